from collections.abc import Iterator

import pytest

from hora import log


@pytest.fixture
def propagating_log() -> Iterator[None]:
    """Lets pytest see Hora's log lines, whoever configured the logger before."""
    logger = log.get_logger()
    before, logger.propagate = logger.propagate, True
    yield
    logger.propagate = before
