import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from rank_records import record

from hora.comm.diagnosis import Call, Condition, Picture, Status, condition, diagnose, is_lost_connection, is_timeout, say_bytes
from hora.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from hora.launch.report import lost_peers

CALL = Call("all_reduce", 418, 4 * 2**20, torch.float32, 8, None, 0.0)
TIMEOUT = "Timed out waiting 30000ms for recv operation to complete"
CLOSED = "Connection closed by peer [127.0.0.1]:4711"


def picture(rank: int, *, begun: int = 418, finished: int = 417, alive: bool = True, state=Condition.RUNNING, **status) -> Picture:
    return Picture(record(rank), Status(1, begun, finished, **({"kind": "all_reduce"} | status)), alive, state)


def explain(*pictures: Picture, call: Call = CALL, error: str = TIMEOUT) -> Exception:
    return diagnose(call, 3, 30.0, pictures, error)


def test_rank_that_has_not_called_is_named_with_what_it_finished():
    error = explain(picture(0), picture(1, begun=417, finished=417))
    assert isinstance(error, CollectiveTimeout)
    assert str(error) == (
        "rank 3 waited 30.0 s for rank 1 in all_reduce #418 (4.0 MiB, float32, 8 ranks). Rank 1 has not called it; it last finished #417."
    )


def test_rank_in_an_earlier_collective_is_named_with_it():
    assert "Rank 1 is still in all_gather #410." in str(explain(picture(1, begun=410, finished=409, kind="all_gather")))


def test_rank_that_made_another_call_is_a_mismatch():
    error = explain(picture(1, kind="broadcast"))
    assert isinstance(error, CollectiveMismatch)
    assert "Rank 1 called broadcast #418 instead." in str(error)


def test_silent_and_stopped_ranks_are_timeouts_that_name_them():
    error = explain(picture(1, alive=False), picture(2, state=Condition.STOPPED, alive=False), picture(4))
    assert isinstance(error, CollectiveTimeout)
    assert "waited 30.0 s for ranks 1 and 2 in" in str(error)
    assert "Rank 1 (process 101 on node1) does not answer; it last reported #417 finished." in str(error)
    assert "Rank 2 (process 102 on node1) is stopped (SIGSTOP); it last reported #417 finished." in str(error)


@pytest.mark.parametrize("error", [TIMEOUT, CLOSED])
def test_rank_whose_process_is_gone_is_lost_whatever_the_backend_says(error):
    found = explain(picture(1, alive=False, state=Condition.GONE), picture(2), error=error)
    assert isinstance(found, PeerLost)
    assert str(found).startswith("rank 3 lost rank 1 in all_reduce #418")
    assert "Rank 1 (process 101 on node1) is gone; it last reported #417 finished." in str(found)


@pytest.mark.parametrize("ranks", [(1,), (1, 12), (0, 1, 2)])
def test_launcher_finds_the_lost_ranks_in_the_words_of_the_error(ranks):
    error = explain(*(picture(rank, left=True) for rank in ranks), error=CLOSED)
    assert lost_peers(f"hora.errors.PeerLost: {error}\n".encode()) == set(ranks)


def test_rank_that_has_left_is_lost():
    found = explain(picture(1, left=True, begun=0, finished=0), error=CLOSED)
    assert isinstance(found, PeerLost)
    assert "Rank 1 has ended or called hora.shutdown; it has finished no collective yet." in str(found)


def test_rank_of_which_nothing_is_known_does_not_answer():
    assert "Rank 1 (process 101 on node1) does not answer" in str(explain(Picture(record(1), None, False, Condition.UNKNOWN)))


def test_broken_connection_without_a_culprit_keeps_what_the_backend_said():
    found = explain(picture(1), error=CLOSED)
    assert isinstance(found, PeerLost)
    assert CLOSED in str(found)
    assert "All other ranks have called it" in str(found)


def test_message_between_two_ranks_names_the_peer_alone():
    found = explain(picture(1, begun=3), picture(2, begun=3), call=CALL._replace(kind="recv", peer=1))
    assert str(found) == (
        "rank 3 waited 30.0 s for rank 1 in recv (4.0 MiB, float32, 8 ranks). Rank 1 (process 101 on node1) runs; it last finished #417."
    )


def test_backends_words_are_told_apart():
    assert is_timeout(TIMEOUT)
    assert not is_lost_connection(TIMEOUT)
    assert is_lost_connection(CLOSED)
    assert not is_timeout("Invalid scalar type")
    assert not is_lost_connection("Invalid scalar type")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (4 * 2**20, "4.0 MiB"), (3 * 2**30, "3.0 GiB")]
)
def test_sizes_read_well(size, text):
    assert say_bytes(size) == text


def test_condition_of_a_process_follows_its_life():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = record(0)
    try:
        other = replace(record(1), pid=child.pid, started_s=psutil.Process(child.pid).create_time())
        assert condition(other, mine) is Condition.RUNNING
        assert condition(replace(other, host="elsewhere"), mine) is Condition.UNKNOWN
        assert condition(replace(other, pid_namespace="other"), mine) is Condition.UNKNOWN
        assert condition(replace(other, started_s=1.0), mine) is Condition.GONE
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert condition(other, mine) is Condition.STOPPED
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert condition(other, mine) is Condition.GONE
    finally:
        child.kill()
        child.communicate()
    assert condition(other, mine) is Condition.GONE
