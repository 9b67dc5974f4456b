"""Where the launcher's main thread waits: for signals, for children that end, and for what other threads deliver."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any

from hora.launch.job_events import Shared

FORWARDED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""Signals that concern the ranks."""


_NOTICES = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


class Interrupted(BaseException):
    """A signal came when there was nobody to pass it on to."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


class Inbox:
    """Takes over the signals of this process inside the `with` block; belongs to the main thread.

    Until `collect` a signal raises `Interrupted` where the main thread stands; from then on `wait` returns it. Signals that were ignored when
    the launcher was started (`nohup`, a shell's `&`) stay ignored, and SIGUSR1 and SIGUSR2 concern ranks alone: while there are none they are
    passed over.

    Attributes:
        end_asked: whether a signal that asks for the end has come, whatever came of it.
    """

    def __init__(self) -> None:
        self._collecting = False
        self.end_asked = False
        self._passed_over: list[int] = []
        self._before: dict[int, Any] = {}
        self._delivered: SimpleQueue[Shared] = SimpleQueue()

    def __enter__(self) -> "Inbox":
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for signum in FORWARDED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._take(signum, self._on_signal)
        # Even where it was ignored: the system then keeps no exit codes.
        self._take(signal.SIGCHLD, lambda _signum, _frame: None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._sender.close()
        self._receiver.close()

    def collect(self) -> None:
        """From now on `wait` returns the signals."""
        self._collecting = True

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A `with` block that a signal ends, for what may take as long as a screen is slow."""
        with suppress(Interrupted):
            self._collecting = False
            try:
                yield
            finally:
                self._collecting = True

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """A `with` block at whose end, and not inside, a signal raises `Interrupted`: for what must not be left half done."""
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
        for signum in self.wait(0.0):
            if signum not in _NOTICES:
                raise Interrupted(signum)

    def wake(self) -> None:
        """Ends a `wait` from any thread."""
        # Full means that the main thread has enough to wake up for; closed, that it waits no more.
        with suppress(OSError):
            self._sender.send(b"\0")

    def deliver(self, event: Shared) -> None:
        """Brings an event from any thread."""
        self._delivered.put(event)
        self.wake()

    def delivered(self) -> Iterator[Shared]:
        """What has been delivered, and what is while it is gone through."""
        with suppress(Empty):
            while True:
                yield self._delivered.get_nowait()

    def wait(self, timeout_s: float | None) -> list[int]:
        """Waits until something happens or the time is over; returns the signals that came, in order."""
        self._receiver.settimeout(None if timeout_s is None else max(timeout_s, 1e-4))
        try:
            data = self._receiver.recv(4096)
        except TimeoutError:
            return []
        return [signum for signum in data if signum in FORWARDED and not self._was_passed_over(signum)]

    def _was_passed_over(self, signum: int) -> bool:
        if signum not in self._passed_over:
            return False
        self._passed_over.remove(signum)
        return True

    def _take(self, signum: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._before[signum] = signal.signal(signum, handler)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if signum in _NOTICES:
            if not self._collecting:
                self._passed_over.append(signum)
            return
        self.end_asked = True
        if not self._collecting:
            raise Interrupted(signum)
