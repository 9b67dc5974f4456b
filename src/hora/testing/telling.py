"""How a test body on a rank tells the test process where it has come to."""

import socket

from hora.testing import channel

_connections: list[socket.socket] = []


def tell_through(sock: socket.socket) -> None:
    """Makes `sock` the connection of this rank to the test process."""
    _connections[:] = [sock]


def tell(event: str) -> None:
    """Says to the test process that this rank has reached `event`; see `SpawnedRanks.await_event`."""
    for sock in _connections:
        channel.send(sock, {"event": event})
