"""Where the output of a rank ends up: its log, and the screen, in the shape that is meant for people."""

import errno
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Protocol, TypeVar

from hora.errors import ConfigError
from hora.holding import holder, is_held_elsewhere
from hora.launch.lines import Live, Shape
from hora.log import get_logger


class Log(Protocol):
    """What is kept of a rank's output."""

    def write(self, data: bytes) -> None:
        """Appends `data`."""

    def tail(self, size_bytes: int) -> bytes:
        """The last bytes that were written in this job."""

    def close(self) -> None:
        """Lets go of it. May be called again."""


_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class RankLog:
    """The file with all that a rank wrote, byte for byte. What it held before is kept; a link in its place, which others may have planted, is not
    followed. While it is open it is this job's alone.

    Args:
        word: the option that names the directory.

    Raises:
        ConfigError: it cannot be opened, or another job writes it.
    """

    def __init__(self, path: Path, word: str = "--log-dir") -> None:
        self.path = path
        try:
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | _NO_FOLLOW, 0o644)
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise ConfigError(f"the log {path} cannot be opened: {why}; name another directory with {word}") from error
        if is_held_elsewhere(self._file):
            pid = holder(self._file)
            self.close()
            who = "" if pid is None else f" (process {pid} on this machine)"
            raise ConfigError(
                f"the log {path} must be written by one job at a time, but another one that still runs{who} writes it; wait for that one, or "
                f"name another directory with {word}"
            )
        self._begin = path.stat().st_size

    def write(self, data: bytes) -> None:
        """Appends `data`; a log that cannot be written is given up with a warning."""
        if self._file is None:
            return
        try:
            write_all(self._file, data)
        except OSError as error:
            get_logger().warning("the log %s cannot be written any more: %s; the job goes on without it", self.path, error.strerror)
            self.close()

    def tail(self, size_bytes: int) -> bytes:
        """The last bytes that were written in this job."""
        with suppress(OSError), self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, end - size_bytes))
            return file.read(size_bytes)
        return b""

    def hold(self, release: ExitStack) -> None:
        """Keeps it this job's alone until `release` is closed, though it is closed before."""
        if self._file is not None:
            release.callback(os.close, os.dup(self._file))

    def close(self) -> None:
        """Closes the file. May be called again."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


Name = TypeVar("Name")


def open_rank_logs(paths: Mapping[Name, Path], word: str) -> dict[Name, RankLog]:
    """The logs at `paths`, all or none; see `RankLog`."""
    with ExitStack() as opened:
        logs = {}
        for name, path in paths.items():
            logs[name] = RankLog(path, word)
            opened.callback(logs[name].close)
        opened.pop_all()
        return logs


class Screen:
    """One of the launcher's own outputs. `lives` are the shapes that draw on the same terminal."""

    def __init__(self, descriptor: int, lives: list[Live]) -> None:
        self._descriptor = descriptor
        self._lives = lives
        self._gone = False

    @property
    def is_terminal(self) -> bool:
        """Whether people look at it through a terminal."""
        return sys.platform != "win32" and os.isatty(self._descriptor)

    def show(self, data: bytes, shape: Shape) -> None:
        """Shows `data`, which comes from `shape`; waits for as long as the screen is busy."""
        if not data or self._gone:
            return
        if shape not in self._lives:
            data = b"".join(live.interrupt() for live in self._lives) + data
        try:
            self._write(data)
        except OSError:
            self._gone = True

    def _write(self, data: bytes) -> None:
        write_all(self._descriptor, data)


class Tail:
    """A log that keeps nothing but its end, in memory: where another launcher keeps the log."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._end = b""

    def write(self, data: bytes) -> None:
        """Appends `data` and forgets what is too old."""
        self._end = (self._end + data)[-self._size_bytes :]

    def tail(self, size_bytes: int) -> bytes:
        """The last bytes."""
        return self._end[-size_bytes:]

    def close(self) -> None:
        """Nothing to let go of."""


class Copied:
    """A log of which a copy is kept elsewhere."""

    def __init__(self, log: Log, copy: Log) -> None:
        self._log = log
        self._copy = copy

    def write(self, data: bytes) -> None:
        """Appends `data` to both."""
        self._log.write(data)
        self._copy.write(data)

    def tail(self, size_bytes: int) -> bytes:
        """The last bytes that were written in this job."""
        return self._log.tail(size_bytes)

    def close(self) -> None:
        """Lets go of both."""
        self._log.close()
        self._copy.close()


class NoLog:
    """Keeps nothing."""

    def write(self, data: bytes) -> None:
        """Nothing."""

    def tail(self, size_bytes: int) -> bytes:  # noqa: ARG002
        """Nothing."""
        return b""

    def close(self) -> None:
        """Nothing."""


@dataclass(frozen=True, eq=False)
class Sink:
    """Takes what one stream of a rank (standard output or standard error) wrote, to log and screen."""

    log: Log
    shape: Shape
    screen: Screen

    def take(self, data: bytes, now: float) -> None:
        """Takes `data`, which was read at the time `now`; waits for as long as the screen is busy."""
        self.log.write(data)
        self.screen.show(self.shape.feed(data, now), self.shape)

    def due(self) -> float | None:
        """When `flush` should be called because something has been held back for long enough."""
        return self.shape.due()

    def flush(self) -> None:
        """Shows what is held back."""
        self.screen.show(self.shape.flush(), self.shape)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, however long that takes."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # The launcher's output may have been made non-blocking by whoever shares it.
            select([], [descriptor], [])
