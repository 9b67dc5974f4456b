"""The order of calls in a group written in Python, of which some are carried out in two halves, and what becomes of errors."""

import gc
import weakref
from datetime import timedelta

import pytest

from hora.comm.backends.queued import QueuedGroup
from hora.comm.torch_private import AllgatherOptions

AT_ONCE = AllgatherOptions()
AT_ONCE.asyncOp = False


def nothing() -> None:
    """A half or a call without consequences."""


def group() -> QueuedGroup:
    return QueuedGroup(0, 1, timedelta(seconds=5))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_a_signal_interrupts_whoever_waits_for_a_call_in_two_halves_and_not_the_call(interrupt):
    signals, done = [interrupt()], []

    def finish() -> None:
        if signals:
            raise signals.pop()
        done.append("posted")

    interrupted = group()
    posted = interrupted.post(nothing, finish)
    with pytest.raises(interrupt):
        interrupted.run(lambda: done.append("next"), [], AT_ONCE)
    assert not done
    assert interrupted.post(nothing, nothing) is None
    interrupted.run(lambda: done.append("next"), [], AT_ONCE)
    assert done == ["posted", "next"]
    assert posted is not None
    assert posted.wait()


def test_a_group_that_is_shut_down_with_half_a_call_is_gone_with_its_last_name():
    gone = group()
    gone.post(nothing, nothing)
    seen = weakref.ref(gone)
    gc.disable()
    try:
        gone.shutdown()
        del gone
        assert seen() is None
    finally:
        gc.enable()
