"""What is said about a rank that failed."""

import dataclasses

import pytest

from hora.errors import PeerLost
from hora.launch.job_events import FailureSeen, Finish, NodeLost, SaveSeen, StopAsked
from hora.launch.report import Casualty, blames_peer, describe, explain_end, explain_survivors, is_doomed, last_words, lost_peers

TRACEBACK = b"""\
step 1
Traceback (most recent call last):
  File "first.py", line 1, in <module>
OSError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "second.py", line 2, in <module>
ValueError: second
"""
CASUALTY = Casualty(rank=3, host="node7", pid=4242, code=1, log="/logs/rank3.log", tail=TRACEBACK)


def test_the_last_traceback_is_quoted() -> None:
    assert last_words(TRACEBACK) == ["Traceback (most recent call last):", '  File "second.py", line 2, in <module>', "ValueError: second"]


def test_without_a_traceback_the_last_lines_are_quoted() -> None:
    assert last_words(b"".join(b"line %d\n\n" % index for index in range(100))) == [f"line {index}" for index in range(88, 100)]


def test_colours_and_redrawn_lines_are_left_out() -> None:
    assert last_words(b"\x1b[1;35mValueError\x1b[0m: no\n\r 10%\r100%\n") == ["ValueError: no", "100%"]


def test_a_long_traceback_keeps_its_two_ends() -> None:
    lines = last_words(
        b"Traceback (most recent call last):\n" + b"".join(b"  frame %d\n" % index for index in range(500)) + b"ValueError: x\n"
    )
    assert len(lines) == 40
    assert (lines[0], lines[1], lines[-1]) == ("Traceback (most recent call last):", "  ...", "ValueError: x")


def test_bytes_that_are_no_text_are_quoted_somehow() -> None:
    assert last_words(b"\xff\xfe\n") == ["\ufffd\ufffd"]


def test_what_torch_puts_in_front_of_a_line_is_left_out() -> None:
    tail = b"".join(b"[rank3]: " + line + b"\n" for line in TRACEBACK.splitlines())
    assert last_words(tail) == last_words(TRACEBACK)


@pytest.mark.parametrize(
    ("tail", "doomed"),
    [
        (b"", False),
        (b"step 1\nstep 2\n", False),
        (TRACEBACK, True),
        (TRACEBACK + b"sys:1: ResourceWarning: unclosed file\n", True),
        (TRACEBACK + b"".join(b"step %d\n" % index for index in range(10)), False),
        (TRACEBACK.replace(b"ValueError: second", b"hora.errors.PeerLost: rank 0 lost rank 1"), False),
    ],
)
def test_a_rank_is_doomed_when_it_has_just_written_its_own_traceback(tail: bytes, doomed: bool) -> None:
    assert is_doomed(tail) == doomed


def test_a_report_has_rank_host_process_cause_and_log() -> None:
    text = describe(CASUALTY)
    assert text.startswith("rank 3 failed on node7 (process 4242): exit code 1\n")
    assert "  ValueError: second" in text
    assert text.endswith("its log: /logs/rank3.log")


def test_a_silent_rank_is_called_silent() -> None:
    assert "(it wrote nothing)" in describe(dataclasses.replace(CASUALTY, tail=b""))


@pytest.mark.parametrize(
    ("code", "words"), [(-11, "killed by SIGSEGV"), (-15, "killed by SIGTERM"), (139, "exit code 139"), (-50, "killed by signal 50")]
)
def test_the_way_of_ending_is_named(code: int, words: str) -> None:
    assert words in describe(dataclasses.replace(CASUALTY, code=code))


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        (1, "out of memory: the kernel killed it"),
        (0, "by hand: the kernel has counted no process"),
        (None, "or by the kernel for want of memory"),
    ],
)
def test_sigkill_is_explained_by_the_count_of_the_kernel(kills: int | None, words: str) -> None:
    text = describe(dataclasses.replace(CASUALTY, code=-9, memory_kills=kills))
    assert "killed by SIGKILL" in text
    assert words in text


def test_a_rank_that_failed_because_its_worker_was_killed_for_want_of_memory_is_told_so() -> None:
    assert "out of memory: the kernel has killed a process here" in describe(dataclasses.replace(CASUALTY, code=1, memory_kills=1))
    assert "memory" not in describe(dataclasses.replace(CASUALTY, code=1, memory_kills=0)).splitlines()[0]


@pytest.mark.parametrize(
    "line",
    [
        "hora.errors.PeerLost: rank 1 is gone",
        "hora.errors.CollectiveTimeout: rank 3 waited 30.0 s for rank 1",
        "RuntimeError: [../third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:40101",
        "RuntimeError: Read error [127.0.0.1]:4: Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    ],
)
def test_who_dies_of_a_lost_peer_says_so(line: str) -> None:
    assert blames_peer(f"Traceback (most recent call last):\n  File x\n{line}\n".encode())


@pytest.mark.parametrize(
    ("error", "ranks"),
    [
        (PeerLost("rank 4 lost rank 1 in all_reduce #2 (12 bytes, float32, 2 ranks). Rank 1 has ended or called hora.shutdown."), {1}),
        (PeerLost("rank 0 lost ranks 2 and 13 in barrier #3"), {2, 13}),
        (PeerLost("rank 0 lost ranks 1, 2 and 3 in barrier #3"), {1, 2, 3}),
        (PeerLost("rank 2 went first and failed: OSError: no such file"), {2}),
        (PeerLost("rank 0 lost a connection in barrier #3"), set()),
        (RuntimeError("connection closed by peer: rank 5 has left the group"), {5}),
        (RuntimeError("Horovod has been shut down. Rank 3 has come to the end of its script. Rank 1 waited for tensor 'a'."), {3}),
        (RuntimeError("Horovod has been shut down. This was caused by an exception on rank 6: KeyError: 2. Rank 1 asked for 'a'"), {6}),
        (RuntimeError("Horovod has been shut down. rank 1 lost rank 0 in negotiation (2 ranks)."), {0}),
    ],
)
def test_the_ranks_that_a_rank_has_lost_are_read_from_its_last_words(error: Exception, ranks: set[int]) -> None:
    tail = f"Traceback (most recent call last):\n  File x\n{type(error).__module__}.{type(error).__name__}: {error}\n".encode()
    assert lost_peers(tail) == ranks
    assert blames_peer(tail)


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        TRACEBACK,
        b"Connection closed by peer, retrying\nTraceback (most recent call last):\nValueError: unrelated\n",
        b"Connection closed by peer\n" + b"step\n" * 20,
    ],
)
def test_other_last_words_blame_nobody(tail: bytes) -> None:
    assert not blames_peer(tail)


@pytest.mark.parametrize(
    ("finish", "text"),
    [
        (Finish(0, None), ""),
        (Finish(1, FailureSeen(0, 2, 1, "the report")), "the report"),
        (Finish(130, StopAsked(0, 2)), "ended by Ctrl-C"),
        (Finish(75, StopAsked(0, 15)), "after a save"),
        (Finish(143, StopAsked(0, 15)), "no rank said"),
        (Finish(75, StopAsked(0, 15), fleeting=True), ""),
        (Finish(75, SaveSeen(0, 4), fleeting=True), ""),
        (Finish(75, SaveSeen(0, 4)), "rank 4 ended before its time after a save"),
        (Finish(75, SaveSeen(0, 4), regroup=True), ""),
        (Finish(1, NodeLost(2)), "the launcher of node 2 is gone"),
    ],
)
def test_the_end_is_explained(finish: Finish, text: str) -> None:
    said = explain_end(finish)
    assert said == text if text in ("", "the report") else text in said


def test_processes_that_cannot_be_killed_are_named() -> None:
    assert explain_survivors([12, 13]) == "still there after SIGKILL: 12, 13"
