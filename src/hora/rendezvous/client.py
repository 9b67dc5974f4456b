"""The rendezvous as its clients see it: keys, values, and waiting for them with a deadline.

A client may be used by several threads: each call has a connection to itself, taken from a small pool, so that a thread that waits does not
hold up the others. A forked child opens connections of its own. Relies on `protocol` for what is sent; retries nothing once connected,
because a request may have been carried out although its answer was lost.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

from hora.errors import LaunchError
from hora.rendezvous.address import Address, parse_address
from hora.rendezvous.protocol import CHALLENGE_BYTES, Channel, ClientHandshake, ProtocolError, WrongKeyError, pack, packed_bytes, unpack
from hora.rendezvous.table import MISSING, OK

_HANDSHAKE_TIMEOUT_S = 5.0
_GRACE_S = 5.0  # how much later than a deadline of its own the server's answer may come
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_MAX_IDLE = 4
_RECEIVE_BYTES = 1 << 16
_NAMED_KEYS = 8
_REQUEST_ROOM_BYTES = 128  # for what a request says beside its keys and values


class _Connection:
    """A connection whose handshake is done."""

    def __init__(self, address: Address, key: bytes, timeout_s: float) -> None:
        self.sock = address.connect(timeout_s)
        try:
            self.channel = self._shake_hands(key)
        except BaseException:
            self.sock.close()
            raise

    def _shake_hands(self, key: bytes) -> Channel:
        handshake = ClientHandshake(key)
        self.sock.sendall(handshake.hello())
        challenge = b""
        while len(challenge) < CHALLENGE_BYTES:
            challenge += self._receive(CHALLENGE_BYTES - len(challenge))
        proof, channel = handshake.answer(challenge)
        self.sock.sendall(proof)
        return channel

    def _receive(self, size_bytes: int) -> bytes:
        data = self.sock.recv(size_bytes)
        if not data:
            raise ConnectionError("it closed the connection")
        return data

    def say(self, *request: bytes) -> None:
        """Sends a request."""
        self.sock.sendall(self.channel.seal(pack(request)))

    def ask(self, *request: bytes, timeout_s: float) -> list[bytes]:
        """Sends a request and returns its answer."""
        self.sock.settimeout(timeout_s)
        self.say(*request)
        while True:
            for payload in self.channel.feed(self._receive(_RECEIVE_BYTES)):
                return unpack(payload)


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
        self._key = key
        self._name = name
        self._timeout_s = timeout_s
        self._met = False
        self._begin()
        with self._connection():
            pass

    def _begin(self) -> None:
        """Starts without connections: here, or anew in a forked child, whose locks may have been held by threads that it does not have."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._will_lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._will_connection: _Connection | None = None
        self._closed = False

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

    def close(self) -> None:
        """Takes leave, so that no will is carried out, and ends every call that other threads have under way. Idempotent."""
        self._notice_fork()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            will, self._will_connection = self._will_connection, None
            for connection in self._busy:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        if will is not None:
            with suppress(OSError):
                will.say(b"goodbye")
            will.sock.close()
        for connection in idle:
            connection.sock.close()

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
        self._notice_fork()
        with self._will_lock:
            if self._will_connection is None:
                self._will_connection = self._connect()
            self._answered(self._ask(self._will_connection, (b"will", key.encode(), value), self._timeout_s))

    def _deadline(self, timeout_s: float | None) -> tuple[float, float]:
        """When the waiting ends, and how long it lasts altogether."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return time.monotonic() + timeout_s, timeout_s

    def _wait(self, request: bytes, keys: Sequence[bytes], deadline: tuple[float, float]) -> list[bytes]:
        end, timeout_s = deadline
        left_s = max(0.0, end - time.monotonic())
        with self._connection() as connection:
            status, *fields = self._ask(connection, (request, b"%.6f" % left_s, *keys), left_s + _GRACE_S)
        if status == MISSING:
            raise TimeoutError(
                f"{self._name} waited {timeout_s:.1f} s at the rendezvous {self._address} for what nobody set: {_listing(fields)}"
            )
        return self._answered([status, *fields])

    def _call(self, *request: bytes) -> list[bytes]:
        with self._connection() as connection:
            answer = self._ask(connection, request, self._timeout_s)
        return self._answered(answer)

    def _answered(self, answer: list[bytes]) -> list[bytes]:
        status, *fields = answer
        if status != OK:
            raise ValueError(f"the rendezvous at {self._address} refused a request of {self._name}: {fields[0].decode(errors='replace')}")
        return fields

    def _ask(self, connection: _Connection, request: Sequence[bytes], timeout_s: float) -> list[bytes]:
        try:
            return connection.ask(*request, timeout_s=timeout_s)
        except TimeoutError as error:
            if error.errno == errno.ETIMEDOUT:  # the peer's machine has vanished; a socket's own timeout has no number
                raise self._lost(error) from error
            raise TimeoutError(
                f"{self._name} got no answer from the rendezvous at {self._address} within {timeout_s:.1f} s; the process that serves it hangs"
            ) from error
        except (OSError, ProtocolError) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ConnectionError:
        if self._closed:
            return ConnectionError(f"{self._name} has closed its connection to the rendezvous at {self._address}")
        return ConnectionError(
            f"{self._name} lost the rendezvous at {self._address} ({error}): the process that serves it (the launcher, or rank 0) has ended or "
            "cannot be reached; see its log"
        )

    def _notice_fork(self) -> None:
        if os.getpid() != self._pid:
            self._begin()

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """Lends a connection; one on which anything went wrong is not used again, since an answer may still be under way on it."""
        self._notice_fork()
        connection = self._borrow()
        try:
            yield connection
        except BaseException:
            self._give_back(connection, usable=False)
            raise
        self._give_back(connection, usable=True)

    def _borrow(self) -> _Connection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
            if connection is not None:
                self._busy.add(connection)
        if connection is not None:
            return connection
        connection = self._connect()
        with self._lock:
            self._busy.add(connection)
        return connection

    def _give_back(self, connection: _Connection, *, usable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            keep = usable and not self._closed and len(self._idle) < _MAX_IDLE
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.sock.close()

    def _connect(self) -> _Connection:
        end = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._closed:
                raise self._lost(ConnectionError("closed"))
            try:
                return self._introduce(max(_FIRST_PAUSE_S, min(_HANDSHAKE_TIMEOUT_S, end - time.monotonic())))
            except WrongKeyError:
                raise LaunchError(
                    f"{self._name} has another key than the rendezvous at {self._address}: their keys differ; give every node the key file of "
                    "the first one, and see that no other job listens there"
                ) from None
            except (OSError, ProtocolError) as error:
                if self._met and isinstance(error, ConnectionRefusedError | FileNotFoundError):
                    raise self._lost(error) from error
                if time.monotonic() + pause_s > end:
                    raise ConnectionError(
                        f"{self._name} found no rendezvous at {self._address} within {self._timeout_s:.1f} s ({error}); see that the process "
                        "that serves it (the launcher, or rank 0) runs, and that the address is right"
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _introduce(self, timeout_s: float) -> _Connection:
        connection = _Connection(self._address, self._key, timeout_s)
        try:
            (limit,) = self._answered(connection.ask(b"hello", self._name.encode(), timeout_s=timeout_s))
        except BaseException:
            connection.sock.close()
            raise
        connection.channel.max_frame_bytes = self._max_frame_bytes = int(limit)
        self._met = True
        return connection

    def _batches(self, items: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
        """Cuts items of one or two fields into lists of fields that fit into a message each."""
        room = self._max_frame_bytes - _REQUEST_ROOM_BYTES
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
