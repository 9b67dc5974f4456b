"""Records of steps that nobody made, for tests of what is concluded from them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hora.diag.prove.causes import Case, find_causes
from hora.diag.prove.findings import Finding
from hora.diag.prove.records import MicroStep, Rows, Run, StepRecord, TensorFacts

NAMES = ("layer.weight", "layer.bias")


def facts(values: Any, dtype: str = "float32") -> TensorFacts:
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    return TensorFacts(array.shape, dtype, hashlib.sha256(array.tobytes()).hexdigest(), array)


def tensors(seed: int, *, scale: float = 1.0, off: float = 0.0, dtype: str = "float32") -> dict[str, TensorFacts]:
    """Tensors drawn from `seed`, times `scale`; `off` is how far the first number is from there."""
    generator = np.random.default_rng(seed)
    drawn = {name: scale * generator.normal(size=8) for name in NAMES}
    drawn[NAMES[0]][0] += off
    return {name: facts(values, dtype) for name, values in drawn.items()}


def call(samples: Iterable[int], *, whole: bool = True) -> tuple[Rows, ...]:
    """One forward whose rows are these samples."""
    keys = np.array([[sample, 3 * sample + 1] for sample in samples], dtype=np.int64 if whole else np.float64)
    return (Rows("0", (len(keys), 4), "int64" if whole else "float32", (keys,)),)


def step(
    number: int,
    rank: int = 0,
    *,
    samples: Sequence[int] = (),
    evaluated: Sequence[int] = (),
    gradient: Mapping[str, TensorFacts] | None = None,
    parameter: Mapping[str, TensorFacts] | None = None,
    buffer: Mapping[str, TensorFacts] | None = None,
    losses: Sequence[tuple[float, int | None]] = (),
    group: Mapping[str, Any] | None = None,
    **notes: Any,
) -> StepRecord:
    return StepRecord(
        rank=rank,
        world_size=1,
        step=number,
        tensors={
            "gradient": (tensors(100 + number) if gradient is None else gradient) if number else {},
            "parameter": tensors(number) if parameter is None else parameter,
            "buffer": buffer or {},
        },
        forwards=(call(samples),) if samples else (),
        evaluation=(call(evaluated),) if evaluated else (),
        micro_steps=tuple(MicroStep(*loss) for loss in losses),
        groups=({"lr": 0.1} | dict(group or {}),),
        notes=notes,
    )


def run(*ranks: Sequence[StepRecord], ends: Mapping[int, StepRecord] | None = None) -> Run:
    """A run whose ranks have these records; step 0 is added where it is not there."""
    whole = [list(records) if records[0].step == 0 else [step(0), *records] for records in ranks]
    return Run(len(ranks), {rank: {record.step: record for record in records} for rank, records in enumerate(whole)}, ends or {})


def causes(reference: Run, other: Run) -> list[Finding]:
    return find_causes(Case.of(reference, other))


def codes(reference: Run, other: Run) -> list[str]:
    return [finding.code for finding in causes(reference, other)]
