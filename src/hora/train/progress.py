"""How far an epoch is: a bar on a terminal, else about ten log lines, on one rank only.

No thread of its own: the bar is redrawn by the calls of the loop, at most ten times a second, because processes that fork workers should
have no threads.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import StreamHandler
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hora import log

_REDRAW_S = 0.1


class EpochProgress(Protocol):
    """Something that is told how far an epoch is."""

    def show(self, step: int, **values: float) -> None:
        """`step` of the epoch's steps are done; `values` are numbers to print beside."""


class Silent:
    """Tells nobody."""

    def show(self, step: int, **values: float) -> None:
        """Does nothing."""


class LogLines:
    """Logs a line whenever another tenth of the epoch is done, each step when there are fewer than ten."""

    def __init__(self, total: int, title: str) -> None:
        self._total = total
        self._title = title
        self._tenths = 0

    def show(self, step: int, **values: float) -> None:
        """Logs a line if one is due."""
        tenths = step * 10 // max(self._total, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            log.get_logger().info("%s: step %d/%d  %s", self._title, step, self._total, _format(values))


class Bar:
    """Moves a bar."""

    def __init__(self, progress: Progress, total: int, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total, values="")
        self._total = total
        self._clock = clock
        self._drawn = -_REDRAW_S

    def show(self, step: int, **values: float) -> None:
        """Moves the bar, and redraws it if that is due."""
        self._progress.update(self._task, completed=step, values=_format(values))
        if self._clock() - self._drawn >= _REDRAW_S or step >= self._total:
            self._drawn = self._clock()
            self._progress.refresh()


def is_tenth(index: int, total: int) -> bool:
    """Whether step `index` of `total` completes another tenth of them; each step does when there are fewer than ten."""
    return (index + 1) * 10 // total > index * 10 // total


@contextmanager
def open_progress(total: int, title: str, *, rank: int) -> Iterator[EpochProgress]:
    """Shows an epoch of `total` steps inside the `with` block.

    On rank 0 a bar if standard error is a terminal, else log lines; nothing on other ranks.
    """
    if rank != 0:
        yield Silent()
    elif sys.stderr.isatty():
        with _rich_progress() as progress:
            yield Bar(progress, total, title)
    else:
        yield LogLines(total, title)


@contextmanager
def _rich_progress() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[values]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress, _log_above_bar():
        yield progress


@contextmanager
def _log_above_bar() -> Iterator[None]:
    """Sends log lines through the standard error that rich has put in place, which prints them above the bar."""
    handlers = [handler for handler in log.get_logger().handlers if isinstance(handler, StreamHandler)]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)


def _format(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}" for name, value in values.items())
