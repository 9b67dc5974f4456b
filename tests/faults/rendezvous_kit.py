"""What tests of the rendezvous share."""

import socket

from hora.rendezvous.server import Server


def plain_socket(server: Server) -> socket.socket:
    """A connection to `server` that has proved nothing."""
    kind, _, where = server.address.partition("://")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(where)
    else:
        host, _, port = where.rpartition(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(20.0)
    return sock
