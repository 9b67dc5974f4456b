"""A point in time by which something must have happened."""

import time


class Deadline:
    """Ends `timeout_s` seconds after it was made. Uses the monotonic clock, so that a clock set anew changes nothing."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s == 0.0

    @property
    def waited_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._end + self.timeout_s
