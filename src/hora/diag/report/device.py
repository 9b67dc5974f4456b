"""When a GPU comes to the marks of a step, without making the host wait: events are recorded with the marks and read when they have passed.

Times are relative to the beginning of the step, for that of an event is a float32 in milliseconds.
"""

from collections import deque
from collections.abc import Sequence

import torch

from hora.events import Mark

_MOST_READ = 2
"""Steps whose events are read when another one ends."""


class DeviceTimes:
    """When the device comes to the marks of one step.

    Attributes:
        times_s: of each mark, after the step before had ended; None until they are read.
        close_behind: whether the device had begun the window, in a plain loop the last backward, when the host was done with backward.
    """

    def __init__(self, begin: torch.cuda.Event, events: list[torch.cuda.Event], close_behind: bool) -> None:
        self._begin = begin
        self._events = events
        self.close_behind = close_behind
        self.times_s: list[float] | None = None

    def read(self) -> list[torch.cuda.Event]:
        """Reads the times, once the device has come to the last mark; returns the events that nobody needs any more."""
        self.times_s = [self._begin.elapsed_time(event) / 1e3 for event in self._events]
        return [self._begin, *self._events[:-1]]

    @property
    def passed(self) -> bool:
        """Whether the device has come to the last mark. Does not wait."""
        return bool(self._events[-1].query())


class DeviceClock:
    """Events of the streams that are current when marks come; used over and over."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._unread: deque[DeviceTimes] = deque()
        self._stamps: list[torch.cuda.Event] = []
        self._begin = self._record()
        self._first: torch.cuda.Event | None = None
        self._close_behind = False

    def stamp(self, mark: Mark) -> None:
        """The device is to note when it comes to here."""
        event = self._record()
        self._stamps.append(event)
        if self._first is None and mark in (Mark.WINDOW_BEGIN, Mark.LAST_BACKWARD):
            self._first = event
        elif mark is Mark.BACKWARD_END and self._first is not None:
            self._close_behind = bool(self._first.query())

    def end_step(self) -> DeviceTimes:
        """The step has ended with the last stamp."""
        times = DeviceTimes(self._begin, self._stamps, self._close_behind)
        self._begin, self._stamps, self._first, self._close_behind = self._stamps[-1], [], None, False
        self._unread.append(times)
        for _ in range(_MOST_READ):
            if self._unread and self._unread[0].passed:
                self._free += self._unread.popleft().read()
        return times

    def read_all(self) -> None:
        """Waits for the device, and reads all that is left."""
        torch.cuda.synchronize()
        while self._unread:
            self._free += self._unread.popleft().read()

    def _record(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def absolute_s(lengths_s: Sequence[float], end_s: float) -> list[float]:
    """When each of the steps of these lengths began, if the last ended at `end_s`."""
    begins: list[float] = []
    for length_s in reversed(lengths_s):
        end_s -= length_s
        begins.append(end_s)
    return begins[::-1]
