import json
from pathlib import Path

import pytest

from hora.cli.demo import Point, compare, conclude, read_curve
from hora.errors import HoraError

DIRECTORIES = {2: Path("runs/2-ranks"), 1: Path("runs/1-rank")}


@pytest.mark.parametrize(
    ("first", "second", "agrees"),
    [
        (100.03, 100.07, True), (100.0, 100.06, False), (999.9, 1000.0, True), (99.991, 99.995, True), (99.98, 99.99, False),
        (7.1231, 7.1235, True), (7.123, 7.124, False), (float("nan"), 7.0, False),
    ],
)  # fmt: skip
def test_agreement_is_to_four_digits(first: float, second: float, agrees: bool) -> None:
    assert Point(1, "valid", first, second).agrees == agrees
    assert Point(1, "valid", second, first).agrees == agrees


def test_exit_code_tells_whether_all_agree(capsys: pytest.CaptureFixture[str]) -> None:
    same, different = Point(1, "train", 5.0, 5.0), Point(2, "valid", 5.0, 6.0)
    assert conclude([same], DIRECTORIES) == 0
    assert "The runs are in runs" in capsys.readouterr().out
    assert conclude([same, different], DIRECTORIES) == 1
    assert "1 of 2 perplexities differ" in capsys.readouterr().err


def test_curves_are_compared_point_by_point(tmp_path: Path) -> None:
    rows = [{"step": 3, "split": "train", "perplexity": 8.5}, {"step": 3, "split": "valid", "perplexity": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = read_curve(tmp_path / "metrics.jsonl")
    points = compare(curve, {(3, "train"): 8.6, (3, "valid"): 9.0})
    assert [(point.step, point.split, point.second) for point in points] == [(3, "train", 8.6), (3, "valid", 9.0)]
    assert not points[1].agrees


def test_curves_of_different_points_are_refused() -> None:
    with pytest.raises(HoraError, match="only one has"):
        compare({(1, "train"): 2.0}, {(2, "train"): 2.0})
    with pytest.raises(HoraError, match="none"):
        compare({}, {})
