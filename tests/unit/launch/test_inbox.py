"""What the launcher does about signals when there are no ranks to pass them on to."""

import os
import signal

import pytest

from hora.launch.inbox import Inbox, Interrupted


def test_a_request_to_end_interrupts_and_is_remembered() -> None:
    with Inbox() as inbox:
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
        assert inbox.end_asked


def test_a_notice_is_passed_over_and_not_given_to_ranks_that_begin_later() -> None:
    with Inbox() as inbox:
        os.kill(os.getpid(), signal.SIGUSR1)
        with inbox.deferring():
            os.kill(os.getpid(), signal.SIGUSR2)
        inbox.collect()
        assert inbox.wait(0.0) == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert inbox.wait(1.0) == [signal.SIGUSR1]
        assert not inbox.end_asked
