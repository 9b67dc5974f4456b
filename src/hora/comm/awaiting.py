"""Waiting for ranks that nobody sees to: a request to end is heard at once meanwhile, since they may never come and there is nothing yet to save.

Who notes such requests and heeds them later (`hora.Preemption`) says so here. Ranks that a launcher has started need none of this: the others come,
or the launcher ends them. Relies on the standard library alone.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hora.log import get_logger

_noters: list[Callable[[], int | None]] = []
_waiting: int | None = None


class AskedToEnd(SystemExit):
    """A signal asked this process to end while it waited for other ranks to come. The exit code is 128 and the number of the signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def add_noter(noted: Callable[[], int | None]) -> None:
    """From now on `noted` says which signal has been noted; None: no signal."""
    _noters.append(noted)


def remove_noter(noted: Callable[[], int | None]) -> None:
    """Takes back `add_noter`."""
    _noters.remove(noted)


def heed(signum: int) -> None:
    """To be called by a handler that notes `signum`.

    Raises:
        AskedToEnd: this thread waits for other ranks.
    """
    if _waiting == threading.get_ident():
        raise AskedToEnd(signum)


@contextmanager
def awaiting_others(rank: int) -> Iterator[None]:
    """Inside the `with` block this process, `rank`, waits for others to come.

    Raises:
        AskedToEnd: a signal that asks for the end was noted, before the block or in it.
    """
    global _waiting
    try:
        _waiting = threading.get_ident()
        _heed_noted()
        yield
    except AskedToEnd as asked:
        get_logger().warning(
            "rank %d ends, as %s asks for, before all ranks have come: nothing has begun yet", rank, signal.Signals(asked.signum).name
        )
        raise
    finally:
        _waiting = None


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside the `with` block this thread takes hold of something that somebody must let go of: what is noted meanwhile is heeded at its end.

    Raises:
        AskedToEnd: this thread waits for other ranks, and a signal that asks for the end has been noted.
    """
    global _waiting
    waiting, _waiting = _waiting, None
    try:
        yield
    finally:
        _waiting = waiting
        _heed_noted()


def _heed_noted() -> None:
    for signum in filter(None, [noted() for noted in _noters]):
        heed(signum)
