"""What all recipes' runs have in common."""

from types import SimpleNamespace
from typing import Any

import pytest

from hora import log
from hora.recipes.course import EpochCourse


class DoneAlready(EpochCourse):
    """A run of two epochs that stands after them."""

    def __init__(self) -> None:
        self._steps, self._epochs = SimpleNamespace(epoch=2), 2  # type: ignore[assignment]

    def update(self, step: Any) -> None:
        raise AssertionError(step)

    def measure(self) -> dict[str, float]:
        raise AssertionError

    def close_epoch(self) -> None:
        raise AssertionError


def test_run_with_nothing_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log.get_logger(), "info", lambda text, *values: said.append(text % values))
    assert DoneAlready().go()
    assert said == ["nothing is left to train: 2 epochs are done, and epochs is 2; give more to go on"]
