"""What ranks and rank 0 tell each other, and its form on the way: JSON, whose every field is checked when it is read."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from hora.errors import CollectiveError
from hora.hvd.negotiation.request import Key, Request

_T = TypeVar("_T")


@dataclass
class Announcement:
    """What a rank tells rank 0.

    Attributes:
        requests: what it has become ready for, of what has no number.
        numbers: the numbers of the rest.
        heard: number of the last decision that it has read.
        leaving: why it leaves, or is no more able to go on; None: it stays.
        waits: operations that its script has waited for longer than a moment, and whether it can give that up.
    """

    requests: list[Request] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    heard: int = 0
    leaving: str | None = None
    waits: list[tuple[Key, bool]] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """As it travels."""
        return _dump([[request.to_json() for request in self.requests], self.numbers, self.heard, self.leaving, self.waits])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Announcement":
        """Reads `to_bytes`.

        Raises:
            CollectiveError: it is something else.
        """

        def read(fields: Any) -> Announcement:
            requests, numbers, heard, leaving, waits = fields
            why = None if leaving is None else str(leaving)
            read_waits = [(_key(key), bool(gives_up)) for key, gives_up in waits]
            return cls(list(map(Request.from_json, requests)), list(map(int, numbers)), int(heard), why, read_waits)

        return _load(data, read)


class Batch(NamedTuple):
    """Operations that are done together, now.

    Attributes:
        entries: which ones.
        error: why they cannot be done; None: they can.
        same_rows: whether all ranks gather equally many rows.
        full: what they are, for ranks that have joined; empty where none has.
        last_joined: of a JOIN, who came last; else -1.
    """

    entries: tuple[int | Key, ...]
    error: str | None = None
    same_rows: bool = False
    full: tuple[Request, ...] = ()
    last_joined: int = -1

    def to_json(self) -> list[Any]:
        """Plain lists and values."""
        return [self.entries, self.error, self.same_rows, [request.to_json() for request in self.full], self.last_joined]

    @classmethod
    def from_json(cls, fields: Any) -> "Batch":
        """Reads `to_json`."""
        entries, error, same_rows, full, last_joined = fields
        read = tuple(entry if isinstance(entry, int) else _key(entry) for entry in entries)
        return cls(read, None if error is None else str(error), bool(same_rows), tuple(map(Request.from_json, full)), int(last_joined))


@dataclass
class Decision:
    """What rank 0 tells a rank: what is done next, in this order.

    Attributes:
        serial: counts the decisions for this rank, from 1.
        batches: what is done.
        learn: numbers of operations, and what they stand for.
        forget: numbers that stand for nothing any more.
        end: why nothing is done any more; None: it goes on.
        release: operations that the script is to wait for no longer, for others wait for it meanwhile.
    """

    serial: int = 0
    batches: list[Batch] = field(default_factory=list)
    learn: list[tuple[int, Key]] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)
    end: str | None = None
    release: list[Key] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """As it travels."""
        return _dump([self.serial, [batch.to_json() for batch in self.batches], self.learn, self.forget, self.end, self.release])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Decision":
        """Reads `to_bytes`.

        Raises:
            CollectiveError: it is something else.
        """

        def read(fields: Any) -> Decision:
            serial, batches, learn, forget, end, release = fields
            numbers = [(int(number), _key(key)) for number, key in learn]
            why = None if end is None else str(end)
            return cls(int(serial), list(map(Batch.from_json, batches)), numbers, list(map(int, forget)), why, list(map(_key, release)))

        return _load(data, read)


def _key(fields: Any) -> Key:
    return int(fields[0]), str(fields[1])


def _dump(fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _load(data: bytes, read: Callable[[Any], _T]) -> _T:
    try:
        return read(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CollectiveError(f"a message of the negotiation cannot be read: {error!r} in {data[:200]!r}") from error
