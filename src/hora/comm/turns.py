"""Letting one rank of each node go first: to download, to preprocess, to build a cache."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hora.comm.deadline import Deadline
from hora.comm.diagnosis import Condition, condition
from hora.comm.records import neighbours_of
from hora.comm.session import Session, session
from hora.errors import CollectiveTimeout, PeerLost

_DONE = "done"
_FIRST_POLL_S, _LONGEST_POLL_S = 0.005, 0.2


@contextmanager
def rank_zero_first(timeout_s: float | None = None) -> Iterator[None]:
    """Runs the `with` block on local rank 0 of each node, then on the other ranks of the node.

    Collective: all ranks enter it, and make no collective in the block. The ranks meet in the job's store: the first one may take an hour to
    download, if `timeout_s` allows it.

    Args:
        timeout_s: how long the others wait; by default the session's deadline.

    Raises:
        ConfigError: on the first rank: a collective was called in the block.
        PeerLost: on the others: the block failed on the first rank, or its process is gone. Their blocks are not run.
        CollectiveTimeout: on the others: the first rank was not done in time.
    """
    here = session()
    key = f"first/{here.topology.node_rank}/{next(here.turns)}"
    if here.topology.local_rank > 0:
        _await_first(here, key, Deadline(here.timeout_s if timeout_s is None else timeout_s))
    outside = here.progress.awaited_by_others
    here.progress.awaited_by_others = outside or (here.topology.local_rank == 0 and here.topology.local_world_size > 1)
    try:
        yield
    except BaseException as error:
        _tell_others(here, key, f"{type(error).__name__}: {error}")
        raise
    finally:
        here.progress.awaited_by_others = outside
    _tell_others(here, key, _DONE)


def _tell_others(here: Session, key: str, outcome: str) -> None:
    if here.topology.local_rank == 0:
        here.store.set(key, outcome)


def _await_first(here: Session, key: str, deadline: Deadline) -> None:
    first = neighbours_of(here.records[here.rank], here.records)[0]
    pause_s = _FIRST_POLL_S
    while not here.store.check([key]):
        if condition(first, here.records[here.rank]) is Condition.GONE:
            raise PeerLost(f"rank {here.rank} waited for rank {first.rank} to go first, but its process {first.pid} is gone; see its log")
        if deadline.passed:
            raise CollectiveTimeout(
                f"rank {here.rank} waited {deadline.waited_s:.1f} s for rank {first.rank} to go first; give more time with timeout_s, or see "
                "in its log what it does"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    outcome = here.store.get(key).decode(errors="replace")
    if outcome != _DONE:
        raise PeerLost(f"rank {first.rank} went first and failed: {outcome}")
