"""What a launcher and its agent on another host say to each other, through the two ends of a remote shell. Pure.

Frames of a kind, a length and a payload: messages are JSON, output of a rank is its rank, 1 or 2 for the stream, and bytes. An agent's first
bytes are `GREETING`: a login shell may have written something before. Nothing in a frame is evaluated or unpickled.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

GREETING = b"\n\0hora agent 1\n"
MAX_FRAME_BYTES = 1 << 24
"""Longer messages (an environment of many megabytes) are refused."""

_HEAD = struct.Struct(">cI")
_PLACE = struct.Struct(">IB")
_MESSAGE, _OUTPUT = b"M", b"O"
_MAX_SKIPPED_BYTES = 1 << 16


@dataclass(frozen=True)
class Message:
    """Something said by one program to the other; it may hold the job's key."""

    fields: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Output:
    """What a rank wrote to standard output (1) or standard error (2)."""

    rank: int
    stream: int
    data: bytes


def pack_message(fields: Mapping[str, Any]) -> bytes:
    """A message as a frame.

    Raises:
        ValueError: it is too long.
    """
    payload = json.dumps(fields).encode("ascii")
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is longer than {MAX_FRAME_BYTES}")
    return _HEAD.pack(_MESSAGE, len(payload)) + payload


def pack_output(rank: int, stream: int, data: bytes) -> bytes:
    """Output of a rank as a frame."""
    return _HEAD.pack(_OUTPUT, _PLACE.size + len(data)) + _PLACE.pack(rank, stream) + data


def as_text(value: str) -> str:
    """An argument or a variable as the bytes that it is, whatever they mean, for JSON."""
    return os.fsencode(value).decode("latin-1")


def from_text(text: str) -> str:
    """The argument or variable of `as_text`, in the encoding of this process."""
    return os.fsdecode(text.encode("latin-1"))


class Decoder:
    """Takes in bytes in pieces of any size and gives out frames; skips what comes before `greeting`."""

    def __init__(self, greeting: bytes = b"") -> None:
        self._greeting = greeting
        self._rest = b""
        self.skipped = b""

    def feed(self, data: bytes) -> Iterator[Message | Output]:
        """The frames that are complete with `data`.

        Raises:
            ValueError: this is no frame.
        """
        self._rest += data
        if self._greeting and not self._skip():
            return
        while len(self._rest) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._rest)
            if kind not in (_MESSAGE, _OUTPUT) or length > MAX_FRAME_BYTES:
                raise ValueError(f"no frame of an agent: {self._rest[:40]!r}")
            end = _HEAD.size + length
            if len(self._rest) < end:
                return
            payload, self._rest = self._rest[_HEAD.size : end], self._rest[end:]
            yield _read_message(payload) if kind == _MESSAGE else _read_output(payload)

    def _skip(self) -> bool:
        before, found, after = self._rest.partition(self._greeting)
        self.skipped = before[-_MAX_SKIPPED_BYTES:]
        if not found:
            self._rest = self._rest[-_MAX_SKIPPED_BYTES:]
            return False
        self._greeting, self._rest = b"", after
        return True


def _read_message(payload: bytes) -> Message:
    fields = json.loads(payload)
    if not isinstance(fields, dict):
        raise ValueError("a message must be a JSON object")
    return Message(fields)


def _read_output(payload: bytes) -> Output:
    if len(payload) < _PLACE.size:
        raise ValueError("output without its place")
    rank, stream = _PLACE.unpack_from(payload)
    return Output(rank, stream, payload[_PLACE.size :])
