"""Connections to the rendezvous: how they are made, lent to threads, and what it means when one breaks.

Each request has a connection to itself, so that a thread that waits for an answer does not hold up the others. A forked child begins without
connections. Nothing is asked twice: a request may have been carried out although its answer was lost.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from hora.errors import LaunchError
from hora.rendezvous.address import Address
from hora.rendezvous.protocol import (
    CHALLENGE_BYTES,
    DEFAULT_MAX_FRAME_BYTES,
    NO_PROOF,
    Channel,
    ClientHandshake,
    ProtocolError,
    WrongKeyError,
    pack,
    unpack,
)
from hora.rendezvous.table import OK

_HANDSHAKE_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_MAX_IDLE = 4
_RECEIVE_BYTES = 1 << 16


class Connection:
    """A connection whose handshake is done."""

    def __init__(self, address: Address, key: bytes, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s
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
        try:
            proof, channel = handshake.answer(challenge)
        except WrongKeyError:
            with suppress(OSError):
                self.sock.sendall(NO_PROOF)  # tells the server why nobody comes, and nothing of this key
            raise
        self.sock.sendall(proof)
        return channel

    def _receive(self, size_bytes: int) -> bytes:
        self.sock.settimeout(max(1e-3, self._end - time.monotonic()))
        data = self.sock.recv(size_bytes)
        if not data:
            raise ConnectionAbortedError("it closed the connection")
        return data

    def say(self, request: Sequence[bytes], timeout_s: float) -> None:
        """Sends a request; what is received afterwards must come within `timeout_s` too."""
        frame = self.channel.seal(pack(request))
        self._end = time.monotonic() + timeout_s
        self.sock.settimeout(timeout_s)
        self.sock.sendall(frame)

    def ask(self, request: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """Sends a request and returns its answer."""
        self.say(request, timeout_s)
        while True:
            for payload in self.channel.feed(self._receive(_RECEIVE_BYTES)):
                return unpack(payload)


class Pool:
    """The connections of one client.

    Args:
        address: where the server is.
        key: the job's secret.
        name: who this is, for messages.
        timeout_s: how long connecting is tried.
    """

    def __init__(self, address: Address, key: bytes, *, name: str, timeout_s: float) -> None:
        self.max_frame_bytes = DEFAULT_MAX_FRAME_BYTES
        self._address = address
        self._key = key
        self._name = name
        self._timeout_s = timeout_s
        self._met = False
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """Starts without connections: here, or anew in a forked child, whose locks may have been held by threads that it does not have."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reserved_lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._reserved: Connection | None = None

    def ask(self, request: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """Sends a request on a connection that nobody else uses, and returns its answer.

        Raises:
            ConnectionError: there is no connection, or it broke.
            TimeoutError: the server was silent for `timeout_s`.
        """
        with self._lend() as connection:
            return self._ask(connection, request, timeout_s)

    def ask_reserved(self, request: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """The same on the one connection that is kept open until `close`, because the server is to notice when it breaks."""
        self._notice_fork()
        with self._reserved_lock:
            if self._reserved is None:
                self._reserved = self._connect()
            return self._ask(self._reserved, request, timeout_s)

    def warm_up(self) -> None:
        """Makes the first connection."""
        with self._lend():
            pass

    def close(self, farewell: Sequence[bytes] | None) -> None:
        """Says `farewell`, if any, on the reserved connection, closes all, and ends every request that other threads have under way. Idempotent."""
        self._notice_fork()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                with suppress(OSError):  # it broke just now
                    connection.sock.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.sock.close()
        with self._reserved_lock:
            reserved, self._reserved = self._reserved, None
        if reserved is not None:
            with suppress(OSError):  # nobody is left to hear it
                if farewell is not None:
                    reserved.say(farewell, self._timeout_s)
            reserved.sock.close()

    def _notice_fork(self) -> None:
        if os.getpid() != self._pid:
            self._begin()

    @contextmanager
    def _lend(self) -> Iterator[Connection]:
        """Lends a connection; one on which anything went wrong is not used again, since an answer may still be under way on it."""
        self._notice_fork()
        connection = self._borrow()
        try:
            yield connection
        except BaseException:
            self._give_back(connection, usable=False)
            raise
        self._give_back(connection, usable=True)

    def _borrow(self) -> Connection:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        connection = idle or self._connect()
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.sock.close()
        raise self._lost(ConnectionError())

    def _give_back(self, connection: Connection, *, usable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            keep = usable and not self._closed and len(self._idle) < _MAX_IDLE
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.sock.close()

    def _connect(self) -> Connection:
        end = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._closed:
                raise self._lost(ConnectionError())
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

    def _introduce(self, timeout_s: float) -> Connection:
        connection = Connection(self._address, self._key, timeout_s)
        try:
            status, field = connection.ask((b"hello", self._name.encode()), timeout_s)
            if status != OK:
                raise LaunchError(f"the rendezvous at {self._address} refused {self._name}: {field.decode(errors='replace')}")
        except BaseException:
            connection.sock.close()
            raise
        connection.channel.max_frame_bytes = self.max_frame_bytes = int(field)
        self._met = True
        return connection

    def _ask(self, connection: Connection, request: Sequence[bytes], timeout_s: float) -> list[bytes]:
        try:
            return connection.ask(request, timeout_s)
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
