"""The handle of a collective in flight."""

import time
from collections.abc import Callable
from typing import Generic

import torch.distributed as dist
from torch import Tensor
from typing_extensions import TypeVar

from hora.comm.algorithms.base import Begun
from hora.comm.deadline import Deadline
from hora.comm.diagnosis import Call
from hora.comm.tracker import Tracker
from hora.errors import ConfigError

_FIRST_POLL_S, _LONGEST_POLL_S = 1e-5, 2e-3

Result = TypeVar("Result", default=Tensor)


class Work(Generic[Result]):
    """A collective in flight. Its tensors belong to the group until `wait` has returned.

    Args:
        begun: handles of the backend.
        call: what was called.
        progress: counts it and explains its failure.
        finish: makes the result once all is done.
    """

    def __init__(self, begun: Begun, call: Call, progress: Tracker, finish: Callable[[], Result]) -> None:
        self._begun = begun
        self._call = call
        self._progress = progress
        self._finish: Callable[[], Result] | None = finish
        self._result: Result

    def wait(self, timeout_s: float | None = None) -> Result:
        """Waits until the collective is done and returns its result; again returns it again.

        On a GPU only the current stream waits, not the host, unless a deadline is given.

        Args:
            timeout_s: deadline in seconds from now; by default the session's, from when the collective began.

        Raises:
            ConfigError: `timeout_s` is not positive.
            CollectiveTimeout: a rank did not take part in time; the message names it.
            PeerLost: a rank is gone.
            CollectiveMismatch: a rank made another call instead.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"timeout_s must be a positive number of seconds, but is {timeout_s!r} instead")
        if self._finish is not None:
            self._progress.await_end(self._call)
            try:
                for work in self._begun:
                    _wait(work, timeout_s)
            except RuntimeError as error:
                raise self._progress.explain(self._call, error) from error
            self._result, self._finish = self._finish(), None
            self._progress.end(self._call)
        return self._result


def _wait(work: dist.Work, timeout_s: float | None) -> None:
    if timeout_s is not None:
        _await_completion(work, Deadline(timeout_s))
    work.wait()


def _await_completion(work: dist.Work, deadline: Deadline) -> None:
    """Asks again and again, which every `Work` allows; not every one takes a deadline (that of a world of one refuses it)."""
    pause_s = _FIRST_POLL_S
    while not work.is_completed():
        if deadline.passed:
            raise RuntimeError(f"timed out after {deadline.timeout_s} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
