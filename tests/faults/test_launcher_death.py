"""The launcher itself is killed, or its guardian: no process of the job is left after a second, and no file."""

import os
import signal
import time
from pathlib import Path

import pytest
from launcher_kit import PROMISED_S, Job, Start, kill

from hora.launch import job_directory

# With a child in the rank's group, and one in a session of its own.
FAMILY = "tell('ready', os.getpid(), grandchild(), grandchild(own_session=True))\nwait_forever()\n"


def everybody(job: Job, ranks: int = 2) -> list[int]:
    return [pid for told in job.expect("ready", ranks).values() for pid in told] + [job.guardian().pid]


def test_nothing_outlives_a_killed_launcher(start: Start) -> None:
    job = start(FAMILY)
    pids = everybody(job)
    assert len(pids) == 7
    kill(job.pid)
    assert job.gone_after(pids) < PROMISED_S
    assert job.members() == []


def test_a_killed_launcher_leaves_no_directory(start: Start) -> None:
    job = start(FAMILY)
    pids = everybody(job)
    (directory,) = job.left_in_temporary()
    assert (job.temporary / directory).stat().st_mode & 0o777 == 0o700
    kill(job.pid)
    job.gone_after(pids)
    assert job.left_in_temporary() == []


def test_stopped_ranks_do_not_outlive_a_killed_launcher(start: Start) -> None:
    job = start(FAMILY)
    pids = everybody(job)
    kill(pids[0], signal.SIGSTOP)
    kill(job.pid)
    assert job.gone_after(pids) < PROMISED_S


def test_ranks_die_with_the_launcher_when_the_guardian_is_killed_first(start: Start) -> None:
    """The kernel's part, which the guardian's would hide: the launcher is stopped, so that it cannot start another guardian."""
    job = start("tell('ready', os.getpid())\nwait_forever()\n")
    pids = everybody(job)
    kill(job.pid, signal.SIGSTOP)
    kill(pids[-1])
    kill(job.pid)
    assert job.gone_after(pids[:-1]) < PROMISED_S


def test_a_killed_guardian_is_replaced_and_the_new_one_guards(start: Start) -> None:
    job = start(FAMILY)
    pids = everybody(job)
    kill(pids[-1])
    renewed = job.guardian_after(pids[-1])
    assert job.process.poll() is None
    kill(job.pid)
    assert job.gone_after([*pids, renewed]) < PROMISED_S
    assert job.left_in_temporary() == []


def test_a_killed_guardian_does_not_disturb_the_job(start: Start) -> None:
    job = start("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\ntell('ready')\nwait_forever()\n")
    job.expect("ready", 2)
    guardian = job.guardian().pid
    kill(guardian)
    job.guardian_after(guardian)
    kill(job.pid, signal.SIGUSR1)
    assert job.wait() == 0
    assert job.err == ""
    assert job.members() == []


def test_a_guardian_that_keeps_dying_is_given_up_with_a_warning(start: Start) -> None:
    job = start("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\ntell('ready')\nwait_forever()\n")
    job.expect("ready", 2)
    guardian = job.guardian().pid
    for _ in range(4):
        kill(guardian)
        guardian = job.guardian_after(guardian)
    kill(guardian)
    while "guardian of this job died 5 times" not in job.err:
        assert job.process.poll() is None
    kill(job.pid, signal.SIGUSR1)
    assert job.wait() == 0


def test_the_guardian_ignores_what_a_terminal_sends(start: Start) -> None:
    job = start("tell('ready')\nwait_forever()\n")
    job.expect("ready", 2)
    guardian = job.guardian().pid
    assert os.getsid(guardian) == guardian
    wanted = sum(1 << (signum - 1) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    end = time.monotonic() + 30
    while ignored_signals(guardian) & wanted != wanted:
        assert time.monotonic() < end


def ignored_signals(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    return int(line.split()[1], 16)


def test_no_descriptor_of_the_launcher_reaches_a_rank(start: Start) -> None:
    """A rank that held the guardian's pipe, or another rank's output, would keep both open beyond the launcher's death."""
    job = start("tell('ready', *sorted(int(fd) for fd in os.listdir('/proc/self/fd')))\n")
    for descriptors in job.expect("ready", 2).values():
        # 3 is the pipe to the test, 4 the directory that is being listed.
        assert set(descriptors) <= {0, 1, 2, 3, 4}
    assert job.wait() == 0


def test_directories_of_dead_launchers_are_swept_at_the_next_start(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launcher and guardian are killed together, so that nobody cleans up."""
    job = start(FAMILY)
    pids = everybody(job)
    kill(job.pid, signal.SIGSTOP)
    kill(pids[-1])
    kill(job.pid)
    job.process.wait()
    (left,) = job.left_in_temporary()
    old = time.time() - 60
    os.utime(job.temporary / left, (old, old))
    living = start(FAMILY, TMPDIR=str(job.temporary))
    living.expect("ready", 2)
    assert left not in job.left_in_temporary()
    (mine,) = job.left_in_temporary()
    os.utime(job.temporary / mine, (old, old))
    assert job_directory.sweep(job.temporary) == []
    assert job.left_in_temporary() == [mine]
