"""The rendezvous as its clients see it: keys, values, and waiting for them with a deadline.

A client may be used by several threads and in forked children (see `pool`). Relies on `protocol` for what is sent.
"""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from hora.rendezvous.address import parse_address
from hora.rendezvous.pool import Pool
from hora.rendezvous.protocol import packed_bytes
from hora.rendezvous.table import MISSING, OK

_GRACE_S = 5.0  # how much later than a deadline of its own the server's answer may come
_REQUEST_ROOM_BYTES = 128  # for what a request says beside its keys and values
_NAMED_KEYS = 8


class Client:
    """Talks to the `Server` at `address`.

    Connecting is tried until `timeout_s` is over, so that the server may be started later than its clients.

    Args:
        address: as the server's `address` says it.
        key: the job's secret.
        name: who this is, for messages here and in the server's log, such as `rank 3`.
        timeout_s: deadline for connecting and for every call that is not given one.

    Raises:
        LaunchError: the server has another key, or is another user's.
        ConnectionError: no rendezvous answered in time.
    """

    def __init__(self, address: str, key: bytes, *, name: str, timeout_s: float) -> None:
        self._address = parse_address(address)
        self._name = name
        self._timeout_s = timeout_s
        self._pool = Pool(self._address, key, name=name, timeout_s=timeout_s)
        self._pool.warm_up()

    def __repr__(self) -> str:
        return f"Client({str(self._address)!r}, name={self._name!r})"

    @property
    def address(self) -> str:
        """Where the server is."""
        return str(self._address)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self, *, take_leave: bool = True) -> None:
        """Takes leave, so that no will is carried out (unless told not to), and ends every call that other threads have under way. Idempotent."""
        self._pool.close((b"goodbye",) if take_leave else None)

    def set(self, key: str, value: bytes) -> None:
        """Sets `key` to `value`."""
        self._call(b"set", key.encode(), value)

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of `key`; waits until it is set.

        Raises:
            TimeoutError: nobody set it in time.
        """
        return self.multi_get([key], timeout_s)[0]

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of `keys`; waits until all are set.

        Raises:
            TimeoutError: not all were set in time; the message names the missing ones.
        """
        deadline = self._deadline(timeout_s)
        values: list[bytes] = []
        for batch in self._batches([(key.encode(),) for key in keys]):
            rest = batch
            while rest:  # an answer carries as many values as fit into it
                values += (part := self._wait(b"get", rest, deadline))
                rest = rest[len(part) :]
        return values

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Waits until all `keys` are set.

        Raises:
            TimeoutError: not all were set in time; the message names the missing ones.
        """
        deadline = self._deadline(timeout_s)
        for batch in self._batches([(key.encode(),) for key in keys]):
            self._wait(b"wait", batch, deadline)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are set; does not wait."""
        return all(self._call(b"check", *batch) == [b"1"] for batch in self._batches([(key.encode(),) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to the counter `key` (absent: 0) in one step and returns the sum. Its value is decimal text."""
        return int(self._call(b"add", key.encode(), b"%d" % amount)[0])

    def append(self, key: str, value: bytes) -> None:
        """Puts `value` behind the value of `key` (absent: empty)."""
        self._call(b"append", key.encode(), value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets `key` to `desired` if its value is `expected`, or if it is absent and `expected` is empty.

        Returns:
            The value afterwards; `expected` if the key is absent still.
        """
        return self._call(b"compare_set", key.encode(), expected, desired)[0]

    def multi_set(self, items: Mapping[str, bytes]) -> None:
        """Sets several keys; in one step if they fit into one message."""
        for batch in self._batches([(key.encode(), value) for key, value in items.items()]):
            self._call(b"multi_set", *batch)

    def delete(self, key: str) -> bool:
        """Removes `key`; whether it was there."""
        return self._call(b"delete", key.encode()) == [b"1"]

    def num_keys(self) -> int:
        """How many keys are set."""
        return int(self._call(b"num_keys")[0])

    def keys(self, prefix: str = "") -> list[str]:
        """The keys that begin with `prefix`, sorted."""
        found: list[bytes] = []
        while page := self._call(b"keys", prefix.encode(), found[-1] if found else b""):
            found += page
        return [key.decode() for key in found]

    def set_will(self, key: str, value: bytes) -> None:
        """Has the server set `key` to `value` when this client is gone without having called `close`: killed, crashed, unplugged."""
        self._answered(self._pool.ask_reserved((b"will", key.encode(), value), self._timeout_s))

    def _deadline(self, timeout_s: float | None) -> tuple[float, float]:
        """When the waiting ends, and how long it lasts altogether."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return time.monotonic() + timeout_s, timeout_s

    def _wait(self, request: bytes, keys: Sequence[bytes], deadline: tuple[float, float]) -> list[bytes]:
        end, timeout_s = deadline
        left_s = max(0.0, end - time.monotonic())
        status, *fields = self._pool.ask((request, b"%.6f" % left_s, *keys), left_s + _GRACE_S)
        if status == MISSING:
            raise TimeoutError(
                f"{self._name} waited {timeout_s:.1f} s at the rendezvous {self._address} for what nobody set: {_listing(fields)}"
            )
        return self._answered([status, *fields])

    def _call(self, *request: bytes) -> list[bytes]:
        return self._answered(self._pool.ask(request, self._timeout_s))

    def _answered(self, answer: list[bytes]) -> list[bytes]:
        status, *fields = answer
        if status != OK:
            raise ValueError(f"the rendezvous at {self._address} refused a request of {self._name}: {fields[0].decode(errors='replace')}")
        return fields

    def _batches(self, items: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
        """Cuts items of one or two fields into lists of fields that fit into a message each."""
        room = self._pool.max_frame_bytes - _REQUEST_ROOM_BYTES
        batches: list[list[bytes]] = []
        left = 0
        for item in items:
            size = sum(packed_bytes(field) for field in item)
            if not batches or size > left:
                batches.append([])
                left = room
            batches[-1] += item
            left -= size
        return batches


def _listing(keys: Sequence[bytes]) -> str:
    named = ", ".join(key.decode(errors="replace") for key in keys[:_NAMED_KEYS])
    return named if len(keys) <= _NAMED_KEYS else f"{named} and {len(keys) - _NAMED_KEYS} more"
