"""Messages between rank 0 and every other rank, over a Gloo group of their own: a thread for each peer waits for them and costs nothing meanwhile."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hora.comm.arrays import bytes_as_tensor

_FRAME_BYTES = 2048
_LENGTH_BYTES = 4
_FIRST_BYTES = _FRAME_BYTES - _LENGTH_BYTES
_FIRST, _REST = 0, 1
_EVER = timedelta(days=3650)
_KEPT = 16


class Links:
    """The links of one rank: to all others on rank 0, to rank 0 on others.

    Collective: all ranks make it.

    Args:
        rank: this one.
        world_size: number of ranks.
        timeout_s: how long the ranks may take to connect.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._peers = [0] if rank else list(range(1, world_size))
        self._group: dist.ProcessGroup | None = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._threads: list[threading.Thread] = []
        # What is on its way must not be freed; of so many that came later the first has certainly arrived.
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def listen(self, deliver: Callable[[int, bytes], bool], lose: Callable[[int, RuntimeError], None]) -> None:
        """Has `deliver(peer, message)` called for what comes, until it returns True, and `lose(peer, error)` when a peer is gone; in threads."""
        for peer in self._peers if self._group is not None else ():
            thread = threading.Thread(target=self._hear, args=(peer, deliver, lose), name=f"hora-hvd-link-{peer}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, peer: int, message: bytes) -> None:
        """Sends `message`; returns before it has arrived.

        Raises:
            RuntimeError: the peer is gone.
        """
        assert self._group is not None
        for tag, data in enumerate(_cut(message)):
            self._sent.append((self._group.send([data], peer, tag), data))
        while len(self._sent) > _KEPT:
            self._sent.popleft()[0].wait(_EVER)

    def close(self, patience_s: float) -> None:
        """Ends the group, when the last messages have come or `patience_s` has passed."""
        group, self._group = self._group, None
        for thread in self._threads:
            thread.join(patience_s)
        self._sent.clear()
        if group is not None and dist.is_initialized() and not any(thread.is_alive() for thread in self._threads):
            dist.destroy_process_group(group)

    def _hear(self, peer: int, deliver: Callable[[int, bytes], bool], lose: Callable[[int, RuntimeError], None]) -> None:
        group = self._group
        assert group is not None
        try:
            while not deliver(peer, _receive(group, peer)):
                pass
        except RuntimeError as error:
            lose(peer, error)


def _cut(message: bytes) -> Sequence[Tensor]:
    """A frame that says how long the message is and has its beginning, and where that is not all of it the rest."""
    first = len(message).to_bytes(_LENGTH_BYTES, "little") + message[:_FIRST_BYTES]
    frame = bytes_as_tensor(first.ljust(_FRAME_BYTES, b"\0"))
    return [frame, bytes_as_tensor(message[_FIRST_BYTES:])] if len(message) > _FIRST_BYTES else [frame]


def _receive(group: dist.ProcessGroup, peer: int) -> bytes:
    frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
    group.recv([frame], peer, _FIRST).wait(_EVER)
    data = frame.numpy().tobytes()
    length, message = int.from_bytes(data[:_LENGTH_BYTES], "little"), data[_LENGTH_BYTES:]
    if length > _FIRST_BYTES:
        rest = torch.empty(length - _FIRST_BYTES, dtype=torch.uint8)
        group.recv([rest], peer, _REST).wait(_EVER)
        message += rest.numpy().tobytes()
    return message[:length]
