"""Links over Gloo, between hosts. A thread for each peer waits for its messages."""

import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora.comm.arrays import bytes_as_tensor
from hora.hvd.engine.links import LENGTH_BYTES, Arrival, Links

_FRAME_BYTES = 2048
_FIRST_BYTES = _FRAME_BYTES - LENGTH_BYTES
_FIRST, _REST = 0, 1
_EVER = timedelta(days=3650)
_KEPT = 16
_LAST_WORD_S = 5.0


class GlooLinks(Links):
    """A Gloo group of the negotiation's own.

    Collective: all ranks make it.

    Args:
        rank: this one.
        world_size: number of ranks.
        timeout_s: how long the ranks may take to connect.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        # What is on its way must not be freed; of so many that came later the first has certainly arrived.
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._arrived: deque[Arrival] = deque()
        self._bell, self._ear = socket.socketpair()
        self._peers = [0] if rank else list(range(1, world_size))
        self._threads = [threading.Thread(target=self._hear, args=(peer,), name=f"hora-hvd-{peer}", daemon=True) for peer in self._peers]
        for thread in self._threads:
            thread.start()

    @override
    def sockets(self) -> Sequence[int]:
        return (self._ear.fileno(),)

    @override
    def take(self, ready: int) -> list[Arrival]:
        count = len(self._ear.recv(_FRAME_BYTES))
        return [self._arrived.popleft() for _ in range(count)]

    @override
    def send(self, peer: int, message: bytes) -> None:
        with suppress(RuntimeError):  # it is gone, which who waits for it is told
            self._post(peer, message)

    def _post(self, peer: int, message: bytes) -> None:
        assert self._group is not None
        for tag, data in enumerate(_cut(message)):
            self._sent.append((self._group.send([data], peer, tag), data))
        while len(self._sent) > _KEPT:
            self._sent.popleft()[0].wait(_EVER)

    @override
    def close(self) -> None:
        """Says to the peers that nothing comes any more, waits for the same of them, and ends the group."""
        for peer in self._peers:
            self.send(peer, b"")
        group, self._group = self._group, None
        for thread in self._threads:
            thread.join(_LAST_WORD_S)
        self._sent.clear()
        self._bell.close()
        self._ear.close()
        if group is not None and dist.is_initialized() and not any(thread.is_alive() for thread in self._threads):
            dist.destroy_process_group(group)

    def _hear(self, peer: int) -> None:
        group = self._group
        assert group is not None
        try:
            while message := _receive(group, peer):
                self._tell(Arrival(peer, message))
        except RuntimeError as error:
            self._tell(Arrival(peer, error))

    def _tell(self, arrival: Arrival) -> None:
        self._arrived.append(arrival)
        with suppress(OSError):  # nobody listens any more
            self._bell.send(b"\0")


def _cut(message: bytes) -> Sequence[Tensor]:
    """A frame that says how long the message is and has its beginning, and where that is not all of it the rest."""
    first = len(message).to_bytes(LENGTH_BYTES, "little") + message[:_FIRST_BYTES]
    frame = bytes_as_tensor(first.ljust(_FRAME_BYTES, b"\0"))
    return [frame, bytes_as_tensor(message[_FIRST_BYTES:])] if len(message) > _FIRST_BYTES else [frame]


def _receive(group: dist.ProcessGroup, peer: int) -> bytes:
    frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
    group.recv([frame], peer, _FIRST).wait(_EVER)
    data = frame.numpy().tobytes()
    length, message = int.from_bytes(data[:LENGTH_BYTES], "little"), data[LENGTH_BYTES:]
    if length > _FIRST_BYTES:
        rest = torch.empty(length - _FIRST_BYTES, dtype=torch.uint8, device="cpu")
        group.recv([rest], peer, _REST).wait(_EVER)
        message += rest.numpy().tobytes()
    return message[:length]
