"""Killing for certain, and the guardian's word."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from hora.launch import reaper

SLEEPER = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(**options: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, start_new_session=True, **options)  # type: ignore[call-overload]
        started.append(process)
        process.stdout.readline()
        return process  # type: ignore[no-any-return]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_group_is_killed_and_waited_for(start: Start) -> None:
    process = start()
    assert reaper.end_processes([process.pid], b"", reap=process.poll) == []
    assert process.returncode == -signal.SIGKILL


def test_marked_processes_are_killed_wherever_they_are(start: Start) -> None:
    mark = f"HORA_TEST_MARK={os.getpid()}"
    marked, other = (
        start(env=os.environ | {"HORA_TEST_MARK": str(os.getpid())}),
        start(env=os.environ | {"HORA_TEST_MARK": f"{os.getpid()}0"}),
    )
    assert list(reaper.find_strays(mark.encode())) == [marked.pid]
    assert reaper.end_processes([], mark.encode(), reap=marked.poll) == []
    assert marked.returncode == -signal.SIGKILL
    assert other.poll() is None


def test_a_group_that_nobody_takes_leave_of_counts_as_there_without_marks(start: Start) -> None:
    process = start()
    assert reaper.end_processes([process.pid], b"") == [process.pid]


def test_an_empty_group_is_no_group(start: Start) -> None:
    process = start()
    assert reaper.kill_group(process.pid, 0)
    process.kill()
    process.wait()
    assert not reaper.kill_group(process.pid, 0)


def guardian(words: bytes, *, job_dir: str) -> None:
    """Runs a guardian to which the launcher says `words` before it is gone."""
    subprocess.run([sys.executable, "-I", "-S", reaper.__file__, "", job_dir], input=words, check=True, timeout=30)


def test_a_guardian_without_a_goodbye_kills_and_removes(start: Start, tmp_path: os.PathLike[str]) -> None:
    job_dir = os.path.join(tmp_path, "job")
    os.mkdir(job_dir)
    open(os.path.join(job_dir, "key"), "w").close()
    condemned, pardoned = start(), start()
    guardian(b"+%d\n+%d\n-%d\n" % (condemned.pid, pardoned.pid, pardoned.pid), job_dir=job_dir)
    assert condemned.wait(30) == -signal.SIGKILL
    assert pardoned.poll() is None
    assert not os.path.exists(job_dir)


def test_a_guardian_with_a_goodbye_does_nothing(start: Start, tmp_path: os.PathLike[str]) -> None:
    process = start()
    guardian(b"+%d\n" % process.pid + reaper.GOODBYE + b"\n", job_dir=os.fspath(tmp_path))
    assert process.poll() is None
    assert os.path.exists(tmp_path)


def test_a_word_that_was_cut_off_is_no_goodbye(start: Start, tmp_path: os.PathLike[str]) -> None:
    process = start()
    guardian(b"+%d\n" % process.pid + reaper.GOODBYE, job_dir=os.path.join(tmp_path, "job"))
    assert process.wait(30) == -signal.SIGKILL
