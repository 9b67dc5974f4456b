"""The memory that the ranks of one group share: where everything stands in it, how they come to share it, and who still lives.

It has no name anywhere: rank 0 makes it (`memfd_create`) and the others open it through `/proc`, so that nothing is left whoever is killed
when, and the size of `/dev/shm` does not matter. Each rank holds a record lock on one byte of it, which the system takes away when its process
dies, and which no child inherits.

It has one lane or several: heads, lines and slots once more, for engines that carry out a call in several threads.
"""

import fcntl
import mmap
import os
import struct

import torch
from torch import Tensor

from hora.comm.torch_private import Store

HEAD_BYTES = 4096
RANK_BYTES = 256
CALL_WORDS = 8
CHANNEL_HEAD_BYTES = 128
TOKEN_BYTES = 16
JOINED, LEFT = 1, 2

SEQ, STATE, CALLS = 0, 4, 64
"""Where in a rank's line its last round, its state and its two calls stand."""
GEN = 20
"""Where in the head the last complete round stands."""

MAX_LANES = 4
_LOCK = "hhqqi4x"


class CannotShare(RuntimeError):
    """The ranks cannot share memory; the message says which one, and why."""


class Segment:
    """A piece of memory in the process of each rank.

    Attributes:
        rank: this one.
        size: number of ranks.
        num_lanes: that all ranks use.
        slot_bytes: that a rank can give in one round.
        channel_bytes: of the ring from a rank to another.
    """

    def __init__(self, store: Store, rank: int, size: int, *, max_lanes: int = 1, unable: str | None = None):
        """Collective: all ranks of the group make it. `unable` says why this one cannot take part.

        There are as many lanes as `max_lanes` of all ranks allow.

        Raises:
            CannotShare: a rank cannot open the memory; on every rank alike.
        """
        self.rank, self.size = rank, size
        self.slot_bytes = slot_bytes_for(size)
        self.channel_bytes = channel_bytes_for(size)
        self.fd = -1
        try:
            if unable is not None:
                raise CannotShare(unable)
            self.fd = self._make(store) if rank == 0 else self._open(store)
            word = str(max_lanes)
        except (OSError, CannotShare) as error:
            if rank == 0:
                store.set("segment", "")
            word = f"rank {rank} cannot: {error}"
        store.set(f"word/{rank}", word)
        words = [store.get(f"word/{other}").decode() for other in range(size)]
        refusals = [said for said in words if not said.isdecimal()]
        if refusals:
            self._close_file()
            raise CannotShare(f"the ranks must share memory, but {'; '.join(refusals)}")
        self.num_lanes = min(int(said) for said in words)
        self.memory = mmap.mmap(self.fd, self._total_bytes)
        self.bytes: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._set_state(JOINED)
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{other}" for other in range(size)])

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.bytes.data_ptr()

    @property
    def _total_bytes(self) -> int:
        return self.lane(MAX_LANES)

    def lane(self, number: int) -> int:
        """Where a lane begins; behind the first one stand the rings of bytes."""
        channels = self.size**2 * (CHANNEL_HEAD_BYTES + self.channel_bytes) if number else 0
        return number * (HEAD_BYTES + self.size * (RANK_BYTES + 4 * self.slot_bytes)) + channels

    def _make(self, store: Store) -> int:
        fd = os.memfd_create("hora", os.MFD_CLOEXEC)
        os.ftruncate(fd, self._total_bytes)
        token = os.urandom(TOKEN_BYTES)
        for number in range(MAX_LANES):
            head = token + struct.pack("IIIIQQ", self.size, 0, 0, 0, self.slot_bytes, self.channel_bytes)
            os.pwrite(fd, head, self.lane(number))
        self._lock(fd)
        store.set("segment", f"{os.getpid()} {fd} {token.hex()}")
        return fd

    def _open(self, store: Store) -> int:
        found = store.get("segment").decode().split()
        if not found:
            raise CannotShare("rank 0 has no memory to share")
        pid, number, token = found
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        # In another container the same number may be another process's.
        if os.pread(fd, TOKEN_BYTES, 0) != bytes.fromhex(token):
            os.close(fd)
            raise CannotShare(f"process {pid} is another one here than for rank 0")
        self._lock(fd)
        return fd

    def _lock(self, fd: int) -> None:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)

    def is_alive(self, rank: int) -> bool:
        """Whether the process of `rank` lives."""
        if rank == self.rank:
            return True
        answer = fcntl.fcntl(self.fd, fcntl.F_GETLK, struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
        return bool(struct.unpack(_LOCK, answer)[0] != fcntl.F_UNLCK)

    def takes_part(self, rank: int) -> bool:
        """Whether `rank` lives and has not left."""
        return not self.has_left(rank) and self.is_alive(rank)

    def has_left(self, rank: int) -> bool:
        """Whether `rank` has said that it takes part no more."""
        return bool(struct.unpack_from("I", self.memory, self.line(rank) + STATE)[0] != JOINED)

    def line(self, rank: int) -> int:
        """Where the line of `rank` begins."""
        return HEAD_BYTES + rank * RANK_BYTES

    def slot(self, rank: int, number: int) -> int:
        """Where the slot of `rank` for round `number` begins; its part of a result stands `slot_bytes` behind."""
        return HEAD_BYTES + self.size * RANK_BYTES + (2 * rank + number % 2) * 2 * self.slot_bytes

    def channel(self, src: int, dst: int) -> int:
        """Where the ring of bytes from `src` to `dst` begins."""
        begin = HEAD_BYTES + self.size * (RANK_BYTES + 4 * self.slot_bytes)
        return begin + (src * self.size + dst) * (CHANNEL_HEAD_BYTES + self.channel_bytes)

    def call_of(self, rank: int, number: int) -> tuple[int, ...]:
        """What `rank` said in round `number` that it was about to do."""
        return struct.unpack_from(f"{CALL_WORDS}Q", self.memory, self.line(rank) + CALLS + number % 2 * CALL_WORDS * 8)

    def _set_state(self, state: int) -> None:
        for number in range(self.num_lanes):
            struct.pack_into("I", self.memory, self.lane(number) + self.line(self.rank) + STATE, state)

    def leave(self) -> None:
        """Tells the others that this rank takes part no more; the memory stays as long as somebody looks at it."""
        self._set_state(LEFT)
        # Not the memory itself: another thread may still be about to look at it.
        self._close_file()

    def _close_file(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def slot_bytes_for(size: int) -> int:
    """Of `size` ranks: large enough that a round costs little beside its bytes, small enough to stay in the caches."""
    return max(size * 32, 256) * 1024


def channel_bytes_for(size: int) -> int:
    """Of `size` ranks: as many as fit into some MiB together."""
    return max(2**18 // max(1, size // 8), 2**14)
