"""Reads what the ranks write, keeps it in their logs, and shows it. A thread of its own, so that a slow screen never delays the supervision.

Nothing is dropped: when the screen is slow, the thread waits for it, and ranks that write more wait in turn. A screen that is gone (a closed
pipe) or a log that cannot be written is given up; the rest goes on.
"""

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from select import select

from hora.errors import ConfigError
from hora.launch.lines import Live, Shape
from hora.log import get_logger

_READ_BYTES = 1 << 16
# A stream that is read to its end for now may be written to by others as fast as it is read.
_CATCH_UP_BYTES = 1 << 20


class RankLog:
    """The file with all that a rank wrote, byte for byte. What it held before is kept.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"the log {path} cannot be opened: {error.strerror}; name another directory with --log-dir") from error
        self._begin = path.stat().st_size

    def write(self, data: bytes) -> None:
        """Appends `data`; a log that cannot be written is given up with a warning."""
        if self._file is None:
            return
        try:
            _write_all(self._file, data)
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

    def close(self) -> None:
        """Closes the file. May be called again."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


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
            _write_all(self._descriptor, data)
        except OSError:
            self._gone = True


@dataclass(eq=False)
class Stream:
    """Standard output or standard error of a rank, on its way to log and screen. `descriptor` is closed when it ends."""

    rank: int
    descriptor: int
    log: RankLog
    shape: Shape
    screen: Screen


@dataclass
class _Request:
    """Something the thread is asked to do: take in a stream, or read all that a rank has written so far."""

    stream: Stream | None = None
    rank: int | None = None
    done: threading.Event = field(default_factory=threading.Event)


class OutputPump:
    """Moves the output of all ranks. `on_end` is called from the thread when it has shown the last of it."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._requests: SimpleQueue[_Request] = SimpleQueue()
        self._streams: list[Stream] = []
        self._finishing = self._ended = False
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="hora-output", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether all has been shown after `finish`."""
        return self._ended

    def add(self, stream: Stream) -> None:
        """Takes in a stream of a rank."""
        os.set_blocking(stream.descriptor, False)
        self._ask(_Request(stream=stream))

    def catch_up(self, rank: int, timeout_s: float) -> bool:
        """Waits until the log of a rank holds all that it has written so far; False if the time is over first (the screen may be slow)."""
        request = _Request(rank=rank)
        self._ask(request)
        return request.done.wait(timeout_s)

    def finish(self) -> None:
        """Has the rest read and shown, and the thread ended; nobody who matters writes any more."""
        self._finishing = True
        self._ask(_Request())

    def close(self) -> None:
        """Closes what the thread was woken with; a thread that a stuck screen still holds keeps it."""
        if self._ended:
            self._wake_sender.close()
            self._wake_receiver.close()

    def _ask(self, request: _Request) -> None:
        self._requests.put(request)
        with suppress(BlockingIOError):  # it has enough to wake up for
            self._wake_sender.send(b"x")

    # The rest runs in the thread.

    def _run(self) -> None:
        try:
            while not self._finishing:
                self._turn()
            self._carry_out_requests()
            for stream in list(self._streams):
                self._read_all(stream)
                self._close(stream)
        finally:
            self._selector.close()
            self._ended = True
            self._on_end()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience_s()):
            if key.data is None:
                self._wake_receiver.recv(_READ_BYTES)
                self._carry_out_requests()
            elif key.data in self._streams:
                self._read(key.data)
        now = time.monotonic()
        for stream in self._streams:
            if (due := stream.shape.due()) is not None and due <= now:
                stream.screen.show(stream.shape.flush(), stream.shape)

    def _patience_s(self) -> float | None:
        times = [due for stream in self._streams if (due := stream.shape.due()) is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _carry_out_requests(self) -> None:
        with suppress(Empty):
            while True:
                request = self._requests.get_nowait()
                if request.stream is not None:
                    self._streams.append(request.stream)
                    self._selector.register(request.stream.descriptor, selectors.EVENT_READ, request.stream)
                for stream in [stream for stream in self._streams if stream.rank == request.rank]:
                    self._read_all(stream)
                request.done.set()

    def _read_all(self, stream: Stream) -> None:
        left = _CATCH_UP_BYTES
        while left > 0 and (size_bytes := self._read(stream)):
            left -= size_bytes

    def _read(self, stream: Stream) -> int:
        """Moves what is there to read; returns how much it was."""
        try:
            data = os.read(stream.descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # a pseudo-terminal ends with EIO
            data = b""
        if data:
            stream.log.write(data)
            stream.screen.show(stream.shape.feed(data, time.monotonic()), stream.shape)
        else:
            self._close(stream)
        return len(data)

    def _close(self, stream: Stream) -> None:
        if stream not in self._streams:
            return
        self._streams.remove(stream)
        stream.screen.show(stream.shape.flush(), stream.shape)
        self._selector.unregister(stream.descriptor)
        os.close(stream.descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # The launcher's output may have been made non-blocking by whoever shares it.
            select([], [descriptor], [])
