"""What a launcher's part of a job comes to, with signals that come late."""

import errno
import os
import signal
from contextlib import ExitStack

import pytest

from hora.errors import LaunchError
from hora.launch.inbox import Inbox
from hora.launch.job_events import Finish
from hora.launch.part import as_launcher


@pytest.mark.parametrize(("signum", "asked"), [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGUSR1, False)])
def test_who_asks_for_the_end_while_all_is_being_closed_is_heard(signum: int, asked: bool) -> None:
    """Else the job would be started anew, and nobody would be told."""

    def work(inbox: Inbox, release: ExitStack) -> Finish:
        inbox.collect()
        release.callback(os.kill, os.getpid(), signum)
        return Finish(1, None)

    assert as_launcher(work) == Finish(1, None, asked=asked)


def test_a_disk_without_room_for_the_jobs_files_is_told_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(inbox: Inbox, release: ExitStack) -> Finish:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a write, which names no file

    monkeypatch.setenv("TMPDIR", "/full")
    with pytest.raises(LaunchError, match="No space left on device; make room in /full, or set TMPDIR to another place"):
        as_launcher(work)


def test_a_signal_before_there_are_ranks_is_the_end() -> None:
    def work(inbox: Inbox, release: ExitStack) -> Finish:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    assert as_launcher(work) == Finish(143, None)
