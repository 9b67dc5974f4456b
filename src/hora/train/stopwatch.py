"""How long training takes, without what is done between its steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class Stopwatch:
    """Runs inside its `with` block, but for what is inside `paused`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lap_began = 0.0
        self._running_since: float | None = None

    @property
    def seconds(self) -> float:
        """How long it has run."""
        running = 0.0 if self._running_since is None else time.perf_counter() - self._running_since
        return self._seconds + running

    def lap(self) -> float:
        """How long it has run since the last lap."""
        began, self._lap_began = self._lap_began, self.seconds
        return self._lap_began - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops it inside the `with` block, if it runs."""
        running = self._running_since is not None
        if running:
            self.__exit__()
        try:
            yield
        finally:
            if running:
                self.__enter__()

    def __enter__(self) -> Self:
        self._running_since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds, self._running_since = self.seconds, None
