"""Whether one host reaches another, and how fast: a connection with the handshake of the rendezvous, then bytes that mean nothing.

Nobody without the key of this examination is listened to, and nothing that comes is kept. Lives as long as its `Listener`.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from hora.rendezvous.protocol import CHALLENGE_BYTES, Channel, ClientHandshake, ProtocolError, ServerSide, pack, unpack

_MAX_FRAME_BYTES = 1 << 12
_MAX_CONNECTIONS = 64
_DEADLINE_S = 5.0
_PIECE = bytes(1 << 18)
_FIRST_BYTES, _LAST_BYTES, _GROWTH = 1 << 20, 1 << 29, 8


class Listener:
    """Takes what is sent to `address`, at a free port, from those who know `key`; a context manager."""

    def __init__(self, address: str, key: bytes) -> None:
        self._key = key
        self._socket = socket.create_server((address, 0), family=_family(address))
        self._room = threading.Semaphore(_MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="hora-doctor-listener", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                if not self._room.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._serve, args=(connection,), name="hora-doctor-connection", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        side = ServerSide(self._key, max_frame_bytes=_MAX_FRAME_BYTES)
        try:
            # One who does not come to the point within the time of a handshake is a stranger.
            with connection, contextlib.suppress(OSError, ProtocolError, ValueError):
                connection.settimeout(_DEADLINE_S)
                while data := connection.recv(_MAX_FRAME_BYTES):
                    sizes = [int(unpack(payload)[0]) for payload in side.feed(data)]
                    for size_bytes in sizes:
                        side.reply(pack([b"go"]))
                        _send_all(connection, side)
                        _take(connection, size_bytes)
                        side.reply(pack([b"done"]))
                    _send_all(connection, side)
        finally:
            self._room.release()


class Sender:
    """A connection to a listener of the same key; a context manager.

    Raises:
        OSError: nobody is reached there in time.
        ProtocolError: whoever is there is no listener of the same key.
    """

    def __init__(self, address: str, port: int, key: bytes) -> None:
        self._socket = socket.create_connection((address, port), _DEADLINE_S)
        try:
            handshake = ClientHandshake(key)
            self._socket.sendall(handshake.hello())
            proof, self._channel = handshake.answer(_exactly(self._socket, CHALLENGE_BYTES), max_frame_bytes=_MAX_FRAME_BYTES)
            self._socket.sendall(proof)
            self.send(0)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, size_bytes: int) -> float:
        """Sends so many bytes; returns the seconds until the other side says that it has them."""
        answers = _answers(self._socket, self._channel)
        self._socket.sendall(self._channel.seal(pack([b"%d" % size_bytes])))
        next(answers)
        begin = time.monotonic()
        for sent in range(0, size_bytes, len(_PIECE)):
            self._socket.sendall(_PIECE[: size_bytes - sent])
        next(answers)
        return time.monotonic() - begin


def measure(address: str, port: int, key: bytes, seconds: float) -> float:
    """Bytes a second to the listener there: of ever larger transfers, the first that takes so many seconds.

    Raises:
        OSError: it is not reached, or is gone.
        ProtocolError: whoever is there is no listener of the same key.
    """
    with Sender(address, port, key) as sender:
        size_bytes = _FIRST_BYTES
        while (took_s := sender.send(size_bytes)) < seconds and size_bytes < _LAST_BYTES:
            size_bytes *= _GROWTH
        return size_bytes / took_s


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _send_all(connection: socket.socket, side: ServerSide) -> None:
    connection.sendall(side.outgoing)
    side.outgoing.clear()


def _take(connection: socket.socket, size_bytes: int) -> None:
    buffer = bytearray(len(_PIECE))
    while size_bytes > 0:
        taken = connection.recv_into(buffer, min(size_bytes, len(buffer)))
        if not taken:
            raise ConnectionResetError("the other side is gone")
        size_bytes -= taken


def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            raise ProtocolError("it has hung up; its key may be another one")
        data += piece
    return data


def _answers(connection: socket.socket, channel: Channel) -> Iterator[bytes]:
    while data := connection.recv(_MAX_FRAME_BYTES):
        yield from channel.feed(data)
    raise ProtocolError("it has hung up; its key may be another one")
