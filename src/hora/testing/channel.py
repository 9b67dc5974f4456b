"""JSON messages over a socket pair: what the test process, the zygote and the ranks say to each other."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">I")


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Sends one message."""
    payload = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """The next message; None when the other end is gone."""
    header = _receive_exactly(sock, _LENGTH.size)
    payload = header and _receive_exactly(sock, _LENGTH.unpack(header)[0])
    if not payload:
        return None
    message: dict[str, Any] = json.loads(payload)
    return message


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    received = b""
    while len(received) < count:
        try:
            piece = sock.recv(count - len(received))
        except ConnectionError:
            return None
        if not piece:
            return None
        received += piece
    return received
