"""Reads what the ranks write and passes it on. A thread of its own, so that a slow screen never delays the supervision.

Nothing is dropped: when the screen is slow, the thread waits for it, and ranks that write more wait in turn. A screen that is gone (a closed
pipe) or a log that cannot be written is given up; the rest goes on.
"""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from hora.launch.sinks import Sink

_READ_BYTES = 1 << 16
# A stream that is read to its end for now may be written to by others as fast as it is read.
_CATCH_UP_BYTES = 1 << 20


class Source(Protocol):
    """Something to read output from. `descriptor` is closed when it ends."""

    @property
    def descriptor(self) -> int:
        """Where to read."""

    @property
    def rank(self) -> int | None:
        """Whose output comes here, if it is that of one rank of this node."""

    @property
    def sinks(self) -> Sequence[Sink]:
        """Where the output goes."""

    def take(self, data: bytes, now: float) -> None:
        """Takes what was read."""

    def end(self) -> None:
        """Nothing more will come."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Standard output or standard error of a rank of this node, or of another process (`rank` is None)."""

    rank: int | None
    descriptor: int
    sink: Sink

    @property
    def sinks(self) -> Sequence[Sink]:
        """The one."""
        return (self.sink,)

    def take(self, data: bytes, now: float) -> None:
        """Passes it on."""
        self.sink.take(data, now)

    def end(self) -> None:
        """Nothing to do."""


@dataclass
class _Request:
    """Something the thread is asked to do: take in a source, or read all that a rank has written so far."""

    source: Source | None = None
    rank: int | None = None
    done: threading.Event = field(default_factory=threading.Event)


class OutputPump:
    """Moves the output of all ranks. `on_end` is called from the thread when it has shown the last of it."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._requests: SimpleQueue[_Request] = SimpleQueue()
        self._sources: list[Source] = []
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

    def add(self, source: Source) -> None:
        """Takes in a source of a rank."""
        os.set_blocking(source.descriptor, False)
        self._ask(_Request(source=source))

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
            for source in list(self._sources):
                self._read_all(source)
                self._close(source)
        finally:
            self._selector.close()
            self._ended = True
            self._on_end()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience_s()):
            if key.data is None:
                self._wake_receiver.recv(_READ_BYTES)
                self._carry_out_requests()
            elif key.data in self._sources:
                self._read(key.data)
        now = time.monotonic()
        for sink in self._sinks():
            if (due := sink.due()) is not None and due <= now:
                sink.flush()

    def _patience_s(self) -> float | None:
        times = [due for sink in self._sinks() if (due := sink.due()) is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _sinks(self) -> list[Sink]:
        return [sink for source in self._sources for sink in source.sinks]

    def _carry_out_requests(self) -> None:
        with suppress(Empty):
            while True:
                request = self._requests.get_nowait()
                if request.source is not None:
                    self._sources.append(request.source)
                    self._selector.register(request.source.descriptor, selectors.EVENT_READ, request.source)
                for source in [source for source in self._sources if request.rank is not None and source.rank == request.rank]:
                    self._read_all(source)
                request.done.set()

    def _read_all(self, source: Source) -> None:
        left = _CATCH_UP_BYTES
        while left > 0 and (size_bytes := self._read(source)):
            left -= size_bytes

    def _read(self, source: Source) -> int:
        """Moves what is there to read; returns how much it was."""
        try:
            data = os.read(source.descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # a pseudo-terminal ends with EIO
            data = b""
        if data:
            source.take(data, time.monotonic())
        else:
            self._close(source)
        return len(data)

    def _close(self, source: Source) -> None:
        if source not in self._sources:
            return
        self._sources.remove(source)
        for sink in source.sinks:
            sink.flush()
        self._selector.unregister(source.descriptor)
        os.close(source.descriptor)
        source.end()
