"""A rank fails, in every way that one can: everybody is gone within a second, and the first failure is what people read."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launcher_kit import PROMISED_S, Start, kill, starting

from hora.launch.supervisor import Patience

WAITING = "tell('ready', os.getpid())\nwait_forever()\n"


def test_a_killed_rank_ends_the_job_within_a_second(start: Start) -> None:
    job = start(WAITING, ranks=3)
    pids = {rank: pid for rank, (pid,) in job.expect("ready", 3).items()}
    kill(pids[1])
    assert job.gone_after(pids.values()) < PROMISED_S
    assert job.wait() == 128 + signal.SIGKILL
    assert "rank 1 failed" in job.err
    assert f"process {pids[1]}" in job.err
    assert "SIGKILL" in job.err
    assert "rank 0" not in job.err
    assert "rank 2" not in job.err


def test_a_stopped_rank_cannot_hold_up_the_end(start: Start) -> None:
    job = start(WAITING, ranks=3)
    pids = {rank: pid for rank, (pid,) in job.expect("ready", 3).items()}
    kill(pids[0], signal.SIGSTOP)
    kill(pids[2])
    assert job.gone_after(pids.values()) < PROMISED_S
    assert job.wait() == 128 + signal.SIGKILL
    assert "rank 2 failed" in job.err


def test_a_rank_that_ignores_sigterm_is_killed(start: Start) -> None:
    job = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITING, ranks=3)
    pids = {rank: pid for rank, (pid,) in job.expect("ready", 3).items()}
    kill(pids[0])
    assert job.gone_after(pids.values()) < PROMISED_S


@pytest.mark.parametrize("own_session", [False, True])
def test_grandchildren_go_with_a_failed_rank(start: Start, own_session: bool) -> None:
    job = start(f"tell('ready', os.getpid(), grandchild(own_session={own_session}))\nwait_forever()\n", ranks=3)
    pids = [pid for told in job.expect("ready", 3).values() for pid in told]
    kill(pids[0])
    assert job.gone_after(pids) < PROMISED_S
    assert job.members() == []


@pytest.mark.parametrize("own_session", [False, True])
def test_grandchildren_go_with_a_job_that_ended_well(start: Start, own_session: bool) -> None:
    job = start(f"tell('ready', grandchild(own_session={own_session}))\n", ranks=3)
    pids = [pid for told in job.expect("ready", 3).values() for pid in told]
    job.gone_after(pids)
    assert job.wait() == 0
    assert job.members() == []


def test_the_exit_code_is_the_failing_ranks_own(start: Start) -> None:
    job = start("sys.exit(41 if RANK == 1 else wait_forever())\n")
    assert job.wait() == 41
    assert "rank 1 failed" in job.err
    assert "exit code 41" in job.err


def test_a_traceback_is_shown_with_rank_host_and_log(start: Start) -> None:
    job = start("if RANK == 2:\n    raise ValueError('no such number: ' + 'x')\nwait_forever()\n", ranks=3)
    assert job.wait() == 1
    report = job.err[job.err.index("hora: ") :]
    assert "rank 2 failed" in report
    assert os.uname().nodename in report
    assert "ValueError: no such number: x" in report
    log = Path(report.partition("its log: ")[2].strip())
    assert "ValueError: no such number: x" in log.read_text()


def test_a_rank_that_lost_its_peer_first_is_not_blamed(start: Start, tmp_path: Path) -> None:
    """Rank 0 notices the end of rank 1, and dies of it before rank 1 itself has come to its end."""
    job = start(
        "if RANK == 0:\n    tell('dying', os.getpid())\n    raise ConnectionError('Connection closed by peer [127.0.0.1]:5')\n"
        "while not os.path.exists(os.environ['GO']):\n    time.sleep(0.001)\n"
        "raise ValueError('the true cause')\n",
        GO=str(tmp_path / "go"),
    )
    ((first,),) = job.expect("dying", 1).values()
    while psutil.pid_exists(first):
        pass
    (tmp_path / "go").touch()
    assert job.wait() == 1
    report = job.err[job.err.index("hora: ") :]
    assert "rank 1 failed" in report
    assert "the true cause" in report
    assert "rank 0" not in report


def test_a_lost_rank_that_takes_long_to_exit_without_a_traceback_is_the_cause(start: Start, tmp_path: Path) -> None:
    """As one that calls `sys.exit` and has PyTorch to tear down, rank 1 ends long after rank 0 has noticed; what takes so long says nothing."""
    job = start(
        "if RANK == 0:\n    tell('dying', os.getpid())\n    raise RuntimeError('PeerLost: rank 0 lost rank 1 in barrier #1')\n"
        "while not os.path.exists(os.environ['GO']):\n    time.sleep(0.001)\n"
        f"time.sleep({2 * Patience().suspicion_s})\nsys.exit(3)\n",
        GO=str(tmp_path / "go"),
    )
    ((first,),) = job.expect("dying", 1).values()
    while psutil.pid_exists(first):
        pass
    (tmp_path / "go").touch()
    assert job.wait() == 3
    assert "rank 1 failed" in job.err
    assert "rank 0 failed" not in job.err


def test_a_cause_that_takes_long_to_die_is_found_by_its_traceback(start: Start, tmp_path: Path) -> None:
    """As a process with much to tear down does, rank 1 ends long after its traceback, and rank 0 notices long before."""
    job = start(
        "import atexit\n"
        "def linger():\n    open(os.environ['GO'], 'w').close()\n    time.sleep(60)\n"
        "if RANK == 1:\n    atexit.register(linger)\n    raise ValueError('the true cause')\n"
        "while not os.path.exists(os.environ['GO']):\n    time.sleep(0.001)\n"
        "raise ConnectionError('Connection closed by peer')\n",
        GO=str(tmp_path / "go"),
    )
    assert job.wait() == 1
    report = job.err[job.err.index("hora: ") :]
    assert "rank 1 failed" in report
    assert "the true cause" in report


def test_a_lost_peer_is_the_cause_when_there_is_no_other(start: Start) -> None:
    job = start("if RANK == 0:\n    raise ConnectionError('Connection closed by peer')\n")
    assert job.wait() == 1
    assert "rank 0 failed" in job.err


def test_ranks_that_end_well_do_not_end_the_others(start: Start) -> None:
    """Rank 1 goes on when it sees that its launcher has taken leave of rank 0."""
    job = start(
        "if RANK == 0:\n    tell('ending', os.getpid())\n    sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\ntell('ready')\nwait_forever()\n",
    )
    told = job.expect_any(2)
    while psutil.pid_exists(told["ending"][0]):
        assert job.process.poll() is None
    kill(job.pid, signal.SIGUSR1)
    assert job.wait() == 0
    assert job.err == ""


@pytest.fixture
def small_memory_group() -> Iterator[Path]:
    """A control group with 200 MB of memory, of the old or the new kind."""
    old = Path("/sys/fs/cgroup/memory")
    group = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"hora-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text("200000000")
    except OSError as error:
        pytest.skip(f"no memory group can be made here: {error}")
    yield group
    group.rmdir()


def test_an_out_of_memory_kill_is_called_so(small_memory_group: Path, tmp_path: Path) -> None:
    body = (
        "hoard = []\nsignal.signal(signal.SIGUSR1, lambda *_: hoard.append(0))\ntell('ready', os.getpid())\n"
        "while not hoard:\n    time.sleep(0.01)\n"
        "while RANK == 1:\n    hoard.append(bytearray(b'x' * 10_000_000))\n"
        "wait_forever()\n"
    )
    with starting(tmp_path) as start:
        job = start(body)
        job.expect("ready", 2)
        for process in job.members():
            (small_memory_group / "cgroup.procs").write_text(str(process.pid))
        kill(job.pid, signal.SIGUSR1)
        assert job.wait() == 128 + signal.SIGKILL
        assert "rank 1 failed" in job.err
        assert "out of memory: the kernel killed it" in job.err


def test_nothing_is_left_in_the_temporary_directory(start: Start) -> None:
    job = start(WAITING, ranks=3)
    pids = {rank: pid for rank, (pid,) in job.expect("ready", 3).items()}
    assert len(job.left_in_temporary()) == 1
    kill(pids[1])
    job.wait()
    assert job.left_in_temporary() == []
