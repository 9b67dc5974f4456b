import io
import json
from pathlib import Path

import pytest
from made_up_records import run, step, tensors
from rich.console import Console

from hora.diag.prove.answers import Answer, conclude
from hora.diag.prove.causes import Case, find_causes
from hora.diag.prove.request import Request
from hora.diag.prove.show import as_json, exit_code, show


def answer(ranks: int = 2, *, off: float = 0.0, scale: float = 1.0, rounding: bool = False) -> Answer:
    gradient = tensors(101, scale=scale, off=off)
    case = Case.of(run([step(1, samples=[1])]), run([step(1, gradient=gradient, samples=[1])]))
    return conclude(ranks, case, find_causes(case), rounding=rounding)


def shown(*answers: Answer, exact: bool = False) -> tuple[str, int]:
    request = Request(("train.py", "[red]"), ranks=(1, 2, 4), exact=exact, directory=Path("runs/p"))
    out = io.StringIO()
    show(Console(file=out, width=100), request, answers)
    document = json.loads(as_json(request, answers))
    assert document["exit_code"] == exit_code(request, answers)
    assert document["summary"] in out.getvalue()
    return out.getvalue(), exit_code(request, answers)


def test_same_bits() -> None:
    text, code = shown(answer(), answer(4), exact=True)
    assert code == 0
    assert "does not change a bit in 1 steps" in text
    assert "train.py [red]: compared with 1 rank" in text


@pytest.mark.parametrize(("exact", "code"), [(False, 0), (True, 1)])
def test_rounding_is_a_difference_in_exact_mode_only(exact: bool, code: int) -> None:
    text, found = shown(answer(off=1e-7, rounding=True), exact=exact)
    assert found == code
    assert "same within rounding (" in text


def test_difference_is_shown_with_its_place_and_cause() -> None:
    text, code = shown(answer(scale=2.0), answer(4, scale=2.0))
    assert code == 1
    assert "differs (1.0e+00)" in text
    assert "first in step 1, in gradients: layer." in text
    assert text.count("gradients-off-by-factor") == 1
    assert "4 ranks: as with 2 ranks" in text
    assert "2, 4 against 1" in text


def test_json_holds_what_is_not_finite() -> None:
    off = answer(off=float("nan"))
    (cell,) = off.cells
    assert cell.size == float("inf")
    assert '"inf"' in as_json(Request(("a.py",)), [off])
