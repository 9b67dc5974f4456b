"""The agent's end of the remote shell: what its launcher says, what is answered, and the output of its ranks."""

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hora.errors import LaunchError
from hora.launch import wire
from hora.launch.display import TAIL_BYTES, Ranks
from hora.launch.lines import Shape
from hora.launch.sinks import Screen, Sink, Tail, write_all

_READ_BYTES = 1 << 16


class Channel:
    """Takes standard input and output of this process for itself: nothing else reads the one, and what is printed goes to standard error."""

    def __init__(self) -> None:
        self._input, self._output = os.dup(0), os.dup(1)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._decoder = wire.Decoder()
        self.write(wire.GREETING)

    def write(self, data: bytes) -> None:
        """Writes frames; waits until they are taken.

        Raises:
            OSError: the launcher is gone.
        """
        with self._lock:
            write_all(self._output, data)

    def say(self, **fields: Any) -> None:
        """Says something."""
        self.write(wire.pack_message(fields))

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next message.

        Raises:
            LaunchError: the launcher has hung up, or said nothing in time.
        """
        end = time.monotonic() + timeout_s
        data = b""
        while True:
            for frame in self._decoder.feed(data):
                if isinstance(frame, wire.Message):
                    return frame.fields
            if not select.select([self._input], [], [], max(0.0, end - time.monotonic()))[0]:
                raise LaunchError(f"the launcher said nothing for {timeout_s:g} s")
            data = os.read(self._input, _READ_BYTES)
            if not data:
                raise LaunchError("the launcher has hung up")

    def listen(self, on_message: Callable[[Mapping[str, Any]], None], on_end: Callable[[], None]) -> None:
        """Hears the launcher in a thread of its own from now on; `on_end` is called when it hangs up."""

        def run() -> None:
            try:
                while data := os.read(self._input, _READ_BYTES):
                    for frame in self._decoder.feed(data):
                        if isinstance(frame, wire.Message):
                            on_message(frame.fields)
            except (OSError, ValueError):
                pass
            on_end()

        threading.Thread(target=run, name="hora-channel", daemon=True).start()


class Relay(Ranks):
    """Sends the output of this node's ranks through `channel`, and keeps the end of it."""

    def __init__(self, channel: Channel, ranks: Iterable[int], on_end: Callable[[], None]) -> None:
        super().__init__({rank: Tail(TAIL_BYTES) for rank in ranks}, on_end)
        self._wire = _Wire(channel)

    def _open(self, rank: int, number: int) -> tuple[int, int, Sink]:
        read_end, write_end = os.pipe()
        return read_end, write_end, Sink(self._logs[rank], _Framed(rank, number + 1), self._wire)


class _Framed(Shape):
    """Output as frames."""

    def __init__(self, rank: int, stream: int) -> None:
        self._rank, self._stream = rank, stream

    def feed(self, data: bytes, now: float) -> bytes:  # noqa: ARG002
        """One frame for each piece."""
        return wire.pack_output(self._rank, self._stream, data)


class _Wire(Screen):
    """The channel, in place of a screen."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(-1, [])
        self._channel = channel

    def _write(self, data: bytes) -> None:
        self._channel.write(data)
