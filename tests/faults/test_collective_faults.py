"""A collective that cannot be completed ends in time with an error that names the rank, the call and what the rank last finished."""

import json
import os
import re
import signal
import socket
import threading
import time

import pytest
import torch

import hora
from hora.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from hora.testing import Outcome, tell

TIMEOUT_S = 2.0
LOOK_S = 4.0
"""Within what time after the failure the error must come: two or three heartbeats, and slack for a busy machine."""


def failure(act) -> list:
    """What `act` raises: kind, message, seconds."""
    begun = time.monotonic()
    try:
        act()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]
    return ["nothing", "", time.monotonic() - begun]


def reduce_once() -> torch.Tensor:
    return hora.all_reduce(torch.ones(1024, 1024))


def wait_until_told(finished: int) -> None:
    """Waits until this rank's progress, which it reports once a second, is known to the others."""
    store, key = hora.session().store, f"status/{hora.rank()}"
    while json.loads(store.get(key))["finished"] < finished:
        threading.Event().wait(0.02)


def wait_for_ever() -> None:
    threading.Event().wait()


def assert_error(outcome: Outcome, kind: type[Exception], *parts: str, within_s: float) -> None:
    assert outcome.kind == "passed", outcome
    found, text, seconds = outcome.result
    assert found == kind.__name__, text
    for part in parts:
        assert re.search(part, text), f"{part!r} is not in {text!r}"
    assert seconds < within_s


def body_with_a_rank_that_is_silent(how: str) -> list:
    reduce_once()
    hora.barrier()
    if hora.rank() == 1:
        wait_until_told(2)
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "leaves":
            hora.shutdown()
        wait_for_ever()
    return failure(reduce_once)


def faulty(spawn_ranks, body, world_size: int = 3, **arguments):
    return spawn_ranks(world_size, body, init={"timeout_s": TIMEOUT_S}, **arguments)


def test_rank_that_is_stopped_is_named(spawn_ranks):
    ranks = faulty(spawn_ranks, body_with_a_rank_that_is_silent, how="stops")
    for number, outcome in zip((0, 2), ranks.wait(but=1), strict=True):
        assert_error(
            outcome,
            CollectiveTimeout,
            rf"rank {number} waited 2\.\d s for rank 1 in all_reduce #3 \(4\.0 MiB, float32, 3 ranks\)",
            r"Rank 1 \(process \d+ on .*\) is stopped \(SIGSTOP\); it last reported #2 finished\.",
            within_s=TIMEOUT_S + LOOK_S,
        )


def test_rank_that_calls_nothing_is_named(spawn_ranks):
    ranks = faulty(spawn_ranks, body_with_a_rank_that_is_silent, how="idles")
    for outcome in ranks.wait(but=1):
        assert_error(
            outcome,
            CollectiveTimeout,
            "for rank 1 in all_reduce #3",
            "Rank 1 has not called it; it last finished #2",
            within_s=TIMEOUT_S + LOOK_S,
        )


def test_rank_that_leaves_is_named(spawn_ranks):
    ranks = faulty(spawn_ranks, body_with_a_rank_that_is_silent, how="leaves")
    for outcome in ranks.wait(but=1):
        assert_error(outcome, PeerLost, "lost rank 1 in all_reduce #3", "has ended or called hora.shutdown", within_s=LOOK_S)


def body_with_a_rank_that_is_killed() -> list:
    reduce_once()
    hora.barrier()
    if hora.rank() == 1:
        wait_until_told(2)
        tell("ready")
        wait_for_ever()
    tell("ready")
    return failure(reduce_once)


def test_rank_that_is_killed_is_named_at_once(spawn_ranks):
    ranks = faulty(spawn_ranks, body_with_a_rank_that_is_killed)
    for number in range(3):
        ranks.await_event(number, "ready")
    ranks.signal(1, signal.SIGKILL)
    for number, outcome in zip((0, 2), ranks.wait(but=1), strict=True):
        assert_error(
            outcome,
            PeerLost,
            rf"rank {number} lost rank 1 in all_reduce #3",
            r"Rank 1 \(process \d+ on .*\) is gone; it last reported #2 finished\.",
            within_s=LOOK_S,
        )


def test_fault_point_of_a_collective_strikes_there(spawn_ranks):
    ranks = spawn_ranks(
        2, body_that_reduces_five_times, environ={"HORA_FAULT": "rank=1,point=collective.4,act=SIGKILL"}, init={"timeout_s": TIMEOUT_S}
    )
    survivor, dead = ranks.wait()
    assert dead.text == "killed by SIGKILL"
    assert_error(survivor, PeerLost, "lost rank 1 in all_reduce #4", r"Rank 1 \(process \d+ on .*\) is gone", within_s=LOOK_S)


def body_that_reduces_five_times() -> list:
    return failure(lambda: [reduce_once() for _ in range(5)])


def body_with_another_call_on_rank_1() -> list:
    if hora.rank() == 1:
        return failure(lambda: hora.all_gather(torch.ones(1024, 1024)))
    return failure(reduce_once)


def test_another_call_is_named_before_its_data_moves(spawn_ranks):
    for outcome in faulty(spawn_ranks, body_with_another_call_on_rank_1, world_size=2).wait():
        assert_error(
            outcome,
            CollectiveMismatch,
            r"rank 0 is about to all_reduce float32 \[1024, 1024\] sum native at .*test_collective_faults.py:\d+",
            r"rank 1 is about to all_gather float32 tensors of any length at .*test_collective_faults.py:\d+",
            within_s=TIMEOUT_S,
        )


def test_another_call_is_named_at_the_deadline_where_calls_are_not_checked(spawn_ranks):
    init = {"timeout_s": TIMEOUT_S, "check_calls": False, "backend": "gloo"}
    first, second = spawn_ranks(2, body_with_another_call_on_rank_1, init=init).wait()
    assert_error(
        first, CollectiveMismatch, "rank 0 is in all_reduce #1", "Rank 1 called all_gather #1 instead", within_s=TIMEOUT_S + LOOK_S
    )
    assert_error(
        second, CollectiveMismatch, "rank 1 is in all_gather #1", "Rank 0 called all_reduce #1 instead", within_s=TIMEOUT_S + LOOK_S
    )


def test_another_call_is_named_at_once_in_shared_memory(spawn_ranks):
    init = {"timeout_s": 60.0, "check_calls": False, "backend": "shm"}
    for rank, outcome in enumerate(spawn_ranks(2, body_with_another_call_on_rank_1, init=init).wait()):
        calls = "rank 0: all_reduce of 1048576 float32 SUM; rank 1: all_gather of 128 bytes"
        assert_error(outcome, CollectiveMismatch, f"rank {rank} is in all_", calls, within_s=LOOK_S)


def body_that_waits_for_an_async_result() -> list:
    if hora.rank() == 1:
        wait_for_ever()
    work = hora.all_reduce(torch.ones(4), async_op=True)
    return failure(lambda: work.wait(timeout_s=0.5))


def test_async_wait_has_a_deadline_of_its_own(spawn_ranks):
    ranks = spawn_ranks(2, body_that_waits_for_an_async_result, init={"timeout_s": 60.0, "check_calls": False})
    (outcome,) = ranks.wait(but=1)
    assert_error(outcome, CollectiveTimeout, r"rank 0 waited 0\.\d s for rank 1 in all_reduce #1", within_s=0.5 + LOOK_S)


def body_that_receives_from_an_idle_rank(kind: str) -> list:
    if hora.rank() == 1:
        wait_for_ever()
    call = hora.recv if kind == "recv" else hora.send
    return failure(lambda: call(torch.ones(1024, 1024), 1))


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_message_that_the_peer_does_not_meet_names_the_peer(spawn_ranks, kind):
    (outcome,) = faulty(spawn_ranks, body_that_receives_from_an_idle_rank, world_size=2, kind=kind).wait(but=1)
    assert_error(
        outcome,
        CollectiveTimeout,
        rf"rank 0 waited 2\.\d s for rank 1 in {kind} \(4\.0 MiB, float32, 2 ranks\)",
        r"Rank 1 \(process \d+ on .*\) runs",
        within_s=TIMEOUT_S + LOOK_S,
    )


def body_that_outlives_the_keeper_of_the_store(how: str) -> list:
    reduce_once()
    tell("ready")
    if hora.rank() == 0:
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_ever()
    found = failure(reduce_once)
    begun = time.monotonic()
    hora.shutdown()
    assert time.monotonic() - begun < 12.0
    return found


@pytest.mark.parametrize(
    ("how", "kind", "text"), [("dies", PeerLost, r"Rank 0 \(.*\) is gone"), ("stops", CollectiveTimeout, r"Rank 0 \(.*\) is stopped")]
)
def test_failure_of_the_rank_that_keeps_the_store_is_told_too(spawn_ranks, how, kind, text):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    ranks = spawn_ranks(2, body_that_outlives_the_keeper_of_the_store, init={"timeout_s": TIMEOUT_S, "init_method": method}, how=how)
    if how == "dies":
        ranks.await_event(0, "ready")
        ranks.await_event(1, "ready")
        ranks.signal(0, signal.SIGKILL)
    (outcome,) = ranks.wait(but=0)
    assert_error(outcome, kind, text, within_s=TIMEOUT_S + LOOK_S)


def body_that_goes_first(how: str) -> list:
    if how == "waits" and hora.rank() == 0:
        wait_for_ever()

    def go() -> None:
        with hora.rank_zero_first():
            if hora.rank() == 0:
                tell("ready")
                if how == "fails":
                    raise OSError("no space left")
                wait_for_ever()

    return failure(go)


def test_failure_of_the_first_rank_frees_the_others(spawn_ranks):
    first, second, third = faulty(spawn_ranks, body_that_goes_first, how="fails").wait()
    assert_error(first, OSError, "no space left", within_s=LOOK_S)
    for outcome in (second, third):
        assert_error(outcome, PeerLost, "rank 0 went first and failed: OSError: no space left", within_s=LOOK_S)


def test_death_of_the_first_rank_frees_the_others(spawn_ranks):
    ranks = faulty(spawn_ranks, body_that_goes_first, how="is killed")
    ranks.await_event(0, "ready")
    ranks.signal(0, signal.SIGKILL)
    for outcome in ranks.wait(but=0):
        assert_error(outcome, PeerLost, r"waited for rank 0 to go first, but its process \d+ is gone", within_s=LOOK_S)


def test_first_rank_that_never_comes_is_named_at_the_deadline(spawn_ranks):
    ranks = faulty(spawn_ranks, body_that_goes_first, how="waits")
    for outcome in ranks.wait(but=0):
        assert_error(outcome, CollectiveTimeout, r"waited 2\.\d s for rank 0 to go first", within_s=TIMEOUT_S + LOOK_S)


def body_with_a_member_that_is_lost(how: str) -> list:
    group = hora.new_group([2, 1])
    tell("ready")
    if hora.rank() == 1:
        wait_for_ever()
    return failure(lambda: hora.all_reduce(torch.ones(4), group=group)) if group.is_member else ["nothing", "", 0.0]


@pytest.mark.parametrize("how", ["dies", "idles"])
def test_lost_member_of_a_group_is_named(spawn_ranks, how):
    ranks = faulty(spawn_ranks, body_with_a_member_that_is_lost, how=how)
    for number in range(3):
        ranks.await_event(number, "ready")
    if how == "dies":
        ranks.signal(1, signal.SIGKILL)
    _, outcome = ranks.wait(but=1)
    where = r"in all_reduce among ranks 1 and 2 \(16 bytes, float32, 2 ranks\)"
    if how == "dies":
        assert_error(outcome, PeerLost, f"rank 2 lost rank 1 {where}", r"Rank 1 \(process \d+ on .*\) is gone", within_s=LOOK_S)
    else:
        what = r"Rank 1 \(process \d+ on .*\) runs"
        assert_error(outcome, CollectiveTimeout, rf"rank 2 waited 2\.\d s for rank 1 {where}", what, within_s=TIMEOUT_S + LOOK_S)
