"""What is said on a rendezvous connection: the handshake, the frames, and what is in them.

Handshake, each message of a fixed size, all nonces fresh:

    client -> server   HELLO      magic, nonce c
    server -> client   CHALLENGE  magic, nonce s, HMAC(key, "server" + c + s)
    client -> server   PROOF      HMAC(key, "client" + c + s)

Both sides have then shown that they know the key, and neither can be answered with its own words (the labels differ). The frames that follow
are `length (4) | payload | MAC (32)`, with MAC = HMAC(session key, direction + sequence number + payload) and session key =
HMAC(key, "session" + c + s): a frame that was changed, repeated, left out, sent back, or recorded on another connection is refused, and
the connection with it. Payloads are authenticated, not encrypted.

A payload is a list of byte strings, each with its length before it; nothing in it is ever executed or unpickled. Pure: no sockets here.
"""

import hmac
import os
import struct
from collections.abc import Iterator, Sequence

MAGIC = b"hora\x00\x00\x00\x01"
"""Begins HELLO and CHALLENGE; the last byte is the version of the protocol."""

NONCE_BYTES = 32
MAC_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES + MAC_BYTES
PROOF_BYTES = MAC_BYTES
NO_PROOF = bytes(PROOF_BYTES)
"""In place of PROOF: the client has found that the server has another key, and leaves. It tells nothing of either key."""

DEFAULT_MAX_FRAME_BYTES = 1 << 20

_LENGTH = struct.Struct(">I")
_SEQUENCE = struct.Struct(">Q")
FRAME_OVERHEAD_BYTES = _LENGTH.size + MAC_BYTES


class ProtocolError(Exception):
    """The other side broke the protocol or does not know the key; the connection must be closed."""


class WrongKeyError(ProtocolError):
    """The other side speaks the protocol but has another key."""


def _proof(key: bytes, label: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(key, b"hora " + label + client_nonce + server_nonce, "sha256")


def _nonce_of(message: bytes) -> bytes:
    if message[: len(MAGIC)] != MAGIC:
        raise ProtocolError("it does not speak this version of the rendezvous protocol")
    return message[len(MAGIC) : len(MAGIC) + NONCE_BYTES]


class ClientHandshake:
    """The client's half of the handshake."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = os.urandom(NONCE_BYTES)

    def hello(self) -> bytes:
        """The first message."""
        return MAGIC + self._nonce

    def answer(self, challenge: bytes, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> tuple[bytes, "Channel"]:
        """Checks that the server knows the key; returns the PROOF to send and the channel that is open after it.

        Raises:
            ProtocolError: `challenge` is no such message.
            WrongKeyError: the server has another key.
        """
        server_nonce = _nonce_of(challenge)
        if not hmac.compare_digest(challenge[-MAC_BYTES:], _proof(self._key, b"server", self._nonce, server_nonce)):
            raise WrongKeyError("the keys differ")
        session_key = _proof(self._key, b"session", self._nonce, server_nonce)
        channel = Channel(session_key, sends=b"c", receives=b"s", max_frame_bytes=max_frame_bytes)
        return _proof(self._key, b"client", self._nonce, server_nonce), channel


class ServerSide:
    """The server's half of a connection: the handshake, then frames. Bytes go in, payloads come out, `outgoing` collects what to send."""

    def __init__(self, key: bytes, *, max_frame_bytes: int) -> None:
        self.outgoing = bytearray()
        self._key = key
        self._max_frame_bytes = max_frame_bytes
        self._nonce = os.urandom(NONCE_BYTES)
        self._client_nonce: bytes | None = None
        self._channel: Channel | None = None
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Takes bytes that arrived and yields each payload that is complete; none before the client has proved that it knows the key.

        Raises:
            ProtocolError: the client broke the protocol.
            WrongKeyError: the client has another key.
        """
        if self._channel is not None:
            yield from self._channel.feed(data)
            return
        self._received += data
        if self._client_nonce is None and len(self._received) >= HELLO_BYTES:
            self._client_nonce = _nonce_of(self._take(HELLO_BYTES))
            self.outgoing += MAGIC + self._nonce + _proof(self._key, b"server", self._client_nonce, self._nonce)
        if self._client_nonce is not None and len(self._received) >= PROOF_BYTES:
            self._channel = self._verify(self._take(PROOF_BYTES), self._client_nonce)
            yield from self._channel.feed(self._take(len(self._received)))

    def reply(self, payload: bytes) -> None:
        """Puts the frame that carries `payload` behind what is to be sent."""
        assert self._channel is not None
        self.outgoing += self._channel.seal(payload)

    def _take(self, size_bytes: int) -> bytes:
        taken = bytes(self._received[:size_bytes])
        del self._received[:size_bytes]
        return taken

    def _verify(self, proof: bytes, client_nonce: bytes) -> "Channel":
        if not hmac.compare_digest(proof, _proof(self._key, b"client", client_nonce, self._nonce)):
            raise WrongKeyError("it has another key; give all nodes the same key file")
        session_key = _proof(self._key, b"session", client_nonce, self._nonce)
        return Channel(session_key, sends=b"s", receives=b"c", max_frame_bytes=self._max_frame_bytes)


class Channel:
    """Turns payloads into frames and bytes back into payloads, on one side of one connection."""

    def __init__(self, session_key: bytes, *, sends: bytes, receives: bytes, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._key = session_key
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0
        self._buffer = bytearray()

    def _mac(self, direction: bytes, sequence: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, direction + _SEQUENCE.pack(sequence) + payload, "sha256")

    def seal(self, payload: bytes) -> bytes:
        """The frame that carries `payload`; frames must be sent in the order in which they were sealed.

        Raises:
            ValueError: the frame would be larger than `max_frame_bytes`; nothing is used up.
        """
        size_bytes = len(payload) + FRAME_OVERHEAD_BYTES
        if size_bytes > self.max_frame_bytes:
            raise ValueError(f"a message must fit into {self.max_frame_bytes} bytes, but has {size_bytes} instead")
        mac = self._mac(self._sends, self._sent, payload)
        self._sent += 1
        return _LENGTH.pack(len(payload)) + payload + mac

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Takes bytes that arrived and yields each payload that is complete.

        Raises:
            ProtocolError: a frame is too large or its MAC is wrong; nothing of it was handed out.
        """
        self._buffer += data
        while (payload := self._next()) is not None:
            yield payload

    def _next(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        # Before anything is kept for it: a length is just a claim.
        if length + FRAME_OVERHEAD_BYTES > self.max_frame_bytes:
            raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {self.max_frame_bytes}")
        end = _LENGTH.size + length
        if len(self._buffer) < end + MAC_BYTES:
            return None
        payload, mac = bytes(self._buffer[_LENGTH.size : end]), bytes(self._buffer[end : end + MAC_BYTES])
        if not hmac.compare_digest(mac, self._mac(self._receives, self._received, payload)):
            raise ProtocolError("a frame was changed, repeated or out of order")
        self._received += 1
        del self._buffer[: end + MAC_BYTES]
        return payload


def pack(fields: Sequence[bytes]) -> bytes:
    """One payload of several byte strings."""
    return b"".join(part for field in fields for part in (_LENGTH.pack(len(field)), field))


def packed_bytes(field: bytes) -> int:
    """How much of a payload `field` takes up."""
    return _LENGTH.size + len(field)


def unpack(payload: bytes) -> list[bytes]:
    """The byte strings in a payload.

    Raises:
        ProtocolError: the lengths in it do not add up.
    """
    fields, position = [], 0
    while position < len(payload):
        begin = position + _LENGTH.size
        if begin > len(payload):
            raise ProtocolError("a payload ends inside a length")
        position = begin + _LENGTH.unpack_from(payload, position)[0]
        if position > len(payload):
            raise ProtocolError("a payload ends inside a field")
        fields.append(payload[begin:position])
    return fields
