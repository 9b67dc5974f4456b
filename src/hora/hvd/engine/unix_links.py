"""Links over Unix sockets, in a directory that only this user can enter."""

import os
import shutil
import socket
import struct
import tempfile
import weakref
from collections.abc import Sequence

from typing_extensions import override

from hora.comm.deadline import Deadline
from hora.comm.torch_private import Store
from hora.errors import PeerLost
from hora.hvd.engine.links import LENGTH_BYTES, LONGEST_BYTES, Arrival, Links

_READ_BYTES = 2**18
_POLL_S = 0.005
_CREDENTIALS = struct.Struct("3i")
_open: "weakref.WeakSet[UnixLinks]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A process forked from a rank, such as a worker of a data loader, must not hold what tells the others that the rank is gone."""
    for links in list(_open):
        links.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class UnixLinks(Links):
    """Sockets of one host.

    Args:
        connections: by peer.
    """

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._connections = connections
        self._peers = {connection.fileno(): peer for peer, connection in connections.items()}
        self._read: dict[int, bytearray] = {descriptor: bytearray() for descriptor in self._peers}
        # Who waited here for a peer that waits for this rank in a collective would wait for ever.
        self._unsent: dict[int, bytearray] = {}
        for connection in connections.values():
            connection.setblocking(False)
        _open.add(self)

    @override
    def sockets(self) -> Sequence[int]:
        return tuple(self._peers)

    @override
    def take(self, ready: int) -> list[Arrival]:
        peer = self._peers[ready]
        try:
            data = self._connections[peer].recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            return [self._lose(ready, f"connection lost: {error}")]
        if not data:
            return [self._lose(ready, "connection closed by peer")]
        held = self._read[ready]
        held += data
        arrivals = []
        while (message := _cut_off(held)) is not None:
            arrivals.append(Arrival(peer, message))
        return arrivals

    @override
    def unsent(self) -> Sequence[int]:
        return tuple(self._connections[peer].fileno() for peer in self._unsent)

    @override
    def send(self, peer: int, message: bytes) -> None:
        self._unsent.setdefault(peer, bytearray()).extend(len(message).to_bytes(LENGTH_BYTES, "little") + message)
        self.flush()

    @override
    def flush(self) -> None:
        for peer in list(self._unsent):
            rest = self._unsent[peer]
            try:
                del rest[: self._connections[peer].send(rest)]
            except BlockingIOError:
                continue
            except OSError:
                rest.clear()  # it is gone, which reading from it will say
            if not rest:
                del self._unsent[peer]

    @override
    def close(self) -> None:
        _open.discard(self)
        self._peers.clear()
        for connection in self._connections.values():
            connection.close()

    def _lose(self, descriptor: int, why: str) -> Arrival:
        return Arrival(self._peers.pop(descriptor), PeerLost(why))


def _cut_off(held: bytearray) -> bytes | None:
    """The first message of what was read, if all of it is there."""
    if len(held) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + int.from_bytes(held[:LENGTH_BYTES], "little")
    if end > LONGEST_BYTES:
        raise PeerLost(f"a message of the negotiation cannot have {end} bytes")
    if len(held) < end:
        return None
    message = bytes(held[LENGTH_BYTES:end])
    del held[:end]
    return message


def connect(store: Store, rank: int, world_size: int, deadline: Deadline) -> UnixLinks:
    """The links of `rank`. Collective: all ranks call it, with one `store`, of names of their own.

    Raises:
        OSError: the ranks do not see the same directory.
        TimeoutError: a rank did not come.
    """
    if rank == 0:
        return _accept(store, world_size, deadline)
    store.wait(["path"])
    path = store.get("path").decode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall(rank.to_bytes(LENGTH_BYTES, "little"))
    except OSError:
        connection.close()
        raise
    return UnixLinks({0: connection})


def _accept(store: Store, world_size: int, deadline: Deadline) -> UnixLinks:
    directory = tempfile.mkdtemp(prefix="hora-hvd-")
    connections: dict[int, socket.socket] = {}
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            path = os.path.join(directory, "s")
            listener.bind(path)
            listener.listen(world_size)
            listener.settimeout(_POLL_S)
            store.set("path", path)
            while len(connections) < world_size - 1:
                if any(store.check([f"failed/{rank}"]) for rank in range(1, world_size)):
                    raise ConnectionError("a rank does not see the directory of the sockets")
                if deadline.passed:
                    raise TimeoutError(f"only ranks {sorted(connections)} came to the negotiation")
                _accept_one(listener, connections)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return UnixLinks(connections)


def _accept_one(listener: socket.socket, connections: dict[int, socket.socket]) -> None:
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return
    connection.settimeout(None)
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        connection.close()
        return
    rank = int.from_bytes(connection.recv(LENGTH_BYTES, socket.MSG_WAITALL), "little")
    connections[rank] = connection


__all__ = ["UnixLinks", "connect"]
