"""Which of several causes is found, and by which further runs; the runs are made up."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_up_records import run, step, tensors

from hora.diag.prove.ablation_names import BATCH_NORM, FLOAT64
from hora.diag.prove.inquiry import Inquiry
from hora.diag.prove.records import Run
from hora.diag.prove.run import RunFailed, Runner


class MadeUpRunner:
    """A script with BatchNorm, which makes gradients on 2 ranks others from step `differs` on, and whose second step is padded there."""

    def __init__(self, differs: int, *, float64: bool):
        self.request = SimpleNamespace(ranks=(1, 2), steps=2)
        self._differs, self._float64 = differs, float64

    def run(self, ranks: int, *, steps: int = 2, again: bool = False, without: tuple[str, ...] = ()) -> Run:
        if FLOAT64 in without and not self._float64:
            raise RunFailed("it insists on float32", run([step(1)]))
        dtype = "float64" if FLOAT64 in without else "float32"
        dealt = {1: [[1, 2, 3, 4], [5]], 2: [[1, 3], [5], [2, 4], [1]]}[ranks]
        numbers = range(1, steps + 1)

        def made(number: int, rank: int) -> Any:
            off = 0.1 * (ranks == 2 and BATCH_NORM not in without and number >= self._differs)
            gradient = tensors(100 + number, off=off, dtype=dtype)
            return step(number, rank, samples=dealt[2 * rank + number - 1], gradient=gradient, batch_norms=["norm"])

        return run(*([made(number, rank) for number in numbers] for rank in range(ranks)))


@pytest.mark.parametrize("float64", [True, False])
def test_samples_of_a_later_step_do_not_explain_an_earlier_difference(float64: bool) -> None:
    found = Inquiry(cast(Runner, MadeUpRunner(1, float64=float64))).answer(2)
    assert [(finding.code, finding.step) for finding in found.findings] == [("batch-statistics-per-rank", 1), ("padded-with-duplicates", 2)]
    found = Inquiry(cast(Runner, MadeUpRunner(2, float64=float64))).answer(2)
    assert [(finding.code, finding.step) for finding in found.findings] == [("padded-with-duplicates", 2)]
