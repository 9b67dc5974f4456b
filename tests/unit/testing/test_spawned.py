import os
import signal
import threading
from contextlib import suppress

import psutil
import pytest

import hora
from hora import events
from hora.testing import RanksFailed, tell


def body_joins() -> list[int]:
    return [hora.rank(), hora.world_size()]


def body_tells_and_waits() -> None:
    tell("here")
    if hora.rank() == 1:
        threading.Event().wait()


def body_stays_alone() -> bool:
    return hora.is_initialized()


def body_reads_the_environment() -> str:
    return os.environ["COLOUR"]


def body_reaches_a_fault_point() -> None:
    events.fault_point("somewhere", rank=hora.rank())


def test_spawned_ranks_join_and_return(spawn_ranks):
    assert [outcome.result for outcome in spawn_ranks(2, body_joins).wait()] == [[0, 2], [1, 2]]


def test_spawned_ranks_can_stay_out_of_any_job(spawn_ranks):
    assert [outcome.result for outcome in spawn_ranks(2, body_stays_alone, join=False).wait()] == [False, False]


def test_spawned_ranks_get_variables(spawn_ranks):
    (outcome,) = spawn_ranks(1, body_reads_the_environment, environ={"COLOUR": "green"}).wait()
    assert outcome.result == "green"


def test_killing_a_rank_after_it_told_where_it_is(spawn_ranks):
    ranks = spawn_ranks(2, body_tells_and_waits)
    ranks.await_event(1, "here")
    ranks.signal(1, signal.SIGKILL)
    assert [(outcome.kind, outcome.text) for outcome in ranks.wait()] == [("passed", ""), ("died", "killed by SIGKILL")]


def test_event_that_never_comes_is_an_error(spawn_ranks):
    with pytest.raises(RanksFailed, match="rank 0 has not told 'nothing'"):
        spawn_ranks(1, body_joins).await_event(0, "nothing")


def test_armed_fault_strikes_its_rank_alone(spawn_ranks):
    ranks = spawn_ranks(2, body_reaches_a_fault_point, environ={"HORA_FAULT": "rank=1,point=somewhere,act=SIGKILL"})
    assert [outcome.kind for outcome in ranks.wait()] == ["passed", "died"]


def test_all_ranks_are_dead_afterwards(spawn_ranks):
    with spawn_ranks(2, body_tells_and_waits) as ranks:
        ranks.await_event(1, "here")
        pids = [rank.pid for rank in ranks.ranks.values()]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def body_leaves_a_child() -> None:
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    tell(str(child))
    threading.Event().wait()


def test_children_of_a_rank_end_with_it(spawn_ranks):
    with spawn_ranks(1, body_leaves_a_child, join=False) as ranks:
        while not ranks.ranks[0].events:
            ranks.ranks[0].hear()
        child = psutil.Process(int(ranks.ranks[0].events[0]))
        assert child.is_running()
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        child.wait(5.0)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
