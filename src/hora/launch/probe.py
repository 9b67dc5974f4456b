"""Asks one host whether a job could use it, beside what else a launcher has to do: nothing here waits for long."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hora.launch.remote import Remote

_GOING_S = 5.0
_READ_BYTES = 1 << 16


class Probe:
    """The agent on a host, asked `question` and let go when it has answered or `timeout_s` is over.

    Attributes:
        problem: why the host cannot be used, empty if it can be; None while that is not known.
        gone: whether nothing is left of it.
        began: when it was asked.
    """

    def __init__(self, remote: Remote, question: Mapping[str, Any], timeout_s: float) -> None:
        self.problem: str | None = None
        self.gone = False
        self._remote = remote
        self._timeout_s = timeout_s
        self.began = time.monotonic()
        self._end = self.began + timeout_s
        for descriptor, _ in remote.ears():
            os.set_blocking(descriptor, False)
        remote.say(question)

    @property
    def pid(self) -> int:
        """Process of the remote shell."""
        return self._remote.pid

    def tend(self, now: float) -> None:
        """Goes on as far as it can."""
        if self.problem is None:
            self._converse(now)
        if self.problem is not None:
            self._leave(now)

    def end(self) -> None:
        """Ends it, whatever it has come to. May be called again."""
        if not self.gone:
            self._remote.hang_up()
            if not self._remote.ended:
                self._remote.spoil("it was given up")
            self._remote.end()
            self.gone = True

    def _converse(self, now: float) -> None:
        self._remote.send()
        for descriptor, take in list(self._remote.ears()):
            with suppress(BlockingIOError):
                take(os.read(descriptor, _READ_BYTES))
        silent = self._remote.awaited
        if not silent or now >= self._end:
            self.problem = self._remote.problem(self._timeout_s) or ""
            self._remote.hang_up()
            self._end = now if silent else now + _GOING_S

    def _leave(self, now: float) -> None:
        self._remote.notice_end()
        if self._remote.ended or now >= self._end:
            self.end()
