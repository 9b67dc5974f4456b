"""What tests of the rendezvous share."""

import socket

from hora.rendezvous.protocol import MAC_BYTES, MAGIC, NONCE_BYTES, pack
from hora.rendezvous.server import Server

READ = pack([b"get", b"0", b"weights"])
WRITE = pack([b"set", b"weights", b"theirs"])


def frame(payload: bytes, mac: bytes = bytes(MAC_BYTES)) -> bytes:
    return len(payload).to_bytes(4, "big") + payload + mac


HELLO = MAGIC + bytes(NONCE_BYTES)
OPENINGS = {
    "a bare request": frame(WRITE),
    "a made-up proof": HELLO + bytes(MAC_BYTES),
    "a request after the hello": HELLO + frame(WRITE),
    "a request after a made-up proof": HELLO + bytes(MAC_BYTES) + frame(WRITE) + frame(READ),
    "a made-up introduction": HELLO + bytes(MAC_BYTES) + frame(pack([b"hello", b"rank 0"])) + frame(READ),
    "HTTP": b"GET /weights HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n" + bytes(100),
    "TLS": bytes.fromhex("16030100ee010000ea0303") + bytes(100),
    "TCPStore": bytes.fromhex("000102030405060708090a0b0c0d0e0f") * 8,
    "a pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94." * 4,
    "a length of 4 GiB": b"\xff" * 200,
    "zeros": bytes(200),
}


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
