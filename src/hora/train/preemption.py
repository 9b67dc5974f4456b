"""Notice of preemption: SIGTERM or SIGUSR1 asks the run to save and end.

The handler sets a flag and does nothing else, unless this process waits in `hora.init` for ranks that nobody sees to (`comm.awaiting`): then it ends,
since there is nothing to save. The loop passes it on with `optimizer.request_stop()`, so that all ranks stop after the
same step, saves, and ends with `EXIT_CODE`, by which schedulers know that the job wants to be started again.
"""

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Final, Self

from hora.comm import awaiting
from hora.errors import ConfigError

EXIT_CODE: Final = 75
"""EX_TEMPFAIL of sysexits.h: the work is saved and not done."""

SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""What schedulers send ahead of the end; Windows has no SIGUSR1."""


class Preemption:
    """Notices preemption inside its `with` block; the handlers that were in force before come back after it.

    One inside the block of another knows of the signal that the outer one has noticed before.

    Raises:
        ConfigError: on entering, outside the main thread: Python delivers signals there only.
    """

    def __init__(self, signals: Sequence[int] = SIGNALS) -> None:
        self._signals = signals
        self._before: list[tuple[int, object]] = []
        self._received: int | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._received is not None

    @property
    def reason(self) -> str:
        """Name of the first signal that came, for messages; empty before."""
        return "" if self._received is None else signal.Signals(self._received).name

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"preemption must be noticed in the main thread, but this is thread {threading.current_thread().name!r}; enter it before "
                "other threads are started"
            )
        self._before = [(number, signal.signal(number, self._note)) for number in self._signals]
        for _, handler in self._before:
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, Preemption) and self._received is None:
                self._received = outer._received
        awaiting.add_noter(self._noted)
        return self

    def __exit__(self, *_: object) -> None:
        awaiting.remove_noter(self._noted)
        for number, handler in reversed(self._before):
            # A handler that was not set from Python cannot be set again from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._before = []

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._received is None:
            self._received = number
        awaiting.heed(number)

    def _noted(self) -> int | None:
        return self._received
