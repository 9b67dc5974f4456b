from collections.abc import Iterator

import pytest
import torch

from hora import log


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine threads wait for each other at every small operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def propagating_log() -> Iterator[None]:
    """Lets pytest see Hora's log lines, whoever configured the logger before."""
    logger = log.get_logger()
    before, logger.propagate = logger.propagate, True
    yield
    logger.propagate = before
