from pathlib import Path
from typing import Any

import pytest

import hora
from hora.recipes.lm.recipe import is_tenth
from hora.recipes.lm.report import Report
from hora.recipes.lm.results import result_rows
from hora.testing import run_ranks
from hora.train.stopwatch import Stopwatch


@pytest.mark.parametrize(("total", "lines"), [(1, 1), (2, 2), (9, 9), (10, 10), (11, 10), (37, 10), (521, 10)])
def test_an_epoch_has_about_ten_lines_and_one_at_its_end(total: int, lines: int) -> None:
    due = [index for index in range(total) if is_tenth(index, total)]
    assert len(due) == lines
    assert due[-1] == total - 1


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stopwatch_counts_neither_pauses_nor_the_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    stopwatch = Stopwatch()
    with stopwatch:
        clock.now += 2
        with stopwatch.paused():
            clock.now += 10
        clock.now += 1
        assert stopwatch.lap() == 3
    clock.now += 50
    with stopwatch.paused():
        clock.now += 50
    with stopwatch:
        clock.now += 4
        assert stopwatch.lap() == 4
    assert stopwatch.seconds == 7


@run_ranks(1, 2)
def test_results_are_rows_with_their_samples(tmp_path: Path) -> None:
    report = Report(train={0: 9.0, 1: 8.0}, valid={0: 7.0, 1: 6.0}, test=5.0, epoch_s={0: 4.0, 1: 2.0}, tokens_per_s=[20.0, 50.0, 30.0])
    rows: dict[str, Any] = {row["what"]: row for row in result_rows("small", report, "hora train lm")}
    assert {what: (row["value"], row["unit"], row["samples"]) for what, row in rows.items()} == {
        "lm/small/training perplexity": (8.0, "perplexity", [9.0, 8.0]),
        "lm/small/validation perplexity": (6.0, "perplexity", [7.0, 6.0]),
        "lm/small/test perplexity": (5.0, "perplexity", [5.0]),
        "lm/small/time per epoch": (3.0, "s", [4.0, 2.0]),
        "lm/small/training speed": (30.0, "tokens/s", [20.0, 50.0, 30.0]),
    }
    for row in rows.values():
        assert row["ranks"] == hora.world_size()
        assert all(row[key] for key in ("machine", "versions", "command", "commit"))


@run_ranks(1)
def test_run_that_was_stopped_has_rows_of_what_it_completed_alone() -> None:
    rows = result_rows("small", Report(preempted="SIGTERM", train={0: 9.0}, valid={0: 7.0}), "hora train lm")
    assert [row["what"] for row in rows] == ["lm/small/training perplexity", "lm/small/validation perplexity"]
