"""The lines of Hora's logger."""

import io
import sys
from collections.abc import Iterator

import pytest

from hora import log


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    logger = log.get_logger()
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def test_lines_go_to_what_standard_error_is_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    log.configure(rank=3, world_size=8)
    log.get_logger().warning("before")
    assert first.getvalue() == "[rank 3/8] before\n"
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    log.get_logger().warning("afterwards")
    assert second.getvalue() == "[rank 3/8] afterwards\n"


def test_only_rank_0_speaks_below_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        log.configure(rank=rank, world_size=2)
        log.get_logger().info("hello from %d", rank)
    assert capsys.readouterr().err == "[rank 0/2] hello from 0\n"
