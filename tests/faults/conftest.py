"""Fixtures of the fault tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_kit import Start, starting


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(body, *flags, ranks=2, **environ)` starts a launcher whose ranks run `body`; see `launcher_kit`."""
    with starting(tmp_path) as start:
        yield start
