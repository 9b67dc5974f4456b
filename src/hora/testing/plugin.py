"""The pytest plugin: `pytest_plugins = ["hora.testing.plugin"]` in the topmost conftest.py.

It keeps the ranks for `@run_ranks` during the session, gives tests that spoil ranks the fixture `spawn_ranks`, and fails tests that leave
variables, threads, processes or files behind.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from hora.testing.guards import Guard
from hora.testing.pool import RankPools
from hora.testing.spawned import SpawnedRanks


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """The ranks on hand, for `run_ranks`."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def spawn_ranks(rank_pools: RankPools) -> Iterator[Callable[..., SpawnedRanks]]:
    """`spawn_ranks(world_size, body, **arguments)` gives fresh ranks that run `body`; see `SpawnedRanks` for `join`, `environ` and `init`.

    They are killed when the test ends.
    """
    with ExitStack() as stack:

        def spawn(
            world_size: int,
            body: Callable[..., Any],
            *,
            join: bool = True,
            environ: Mapping[str, str] | None = None,
            init: Mapping[str, Any] | None = None,
            **arguments: Any,
        ) -> SpawnedRanks:
            ranks = SpawnedRanks(rank_pools.zygote, world_size, body, arguments, join=join, environ=environ, init=init)
            return stack.enter_context(ranks)

        yield spawn


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves behind what was not there before."""
    guard = Guard.take()
    yield
    if leaks := guard.leaks():
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)
