"""What carries out the collectives of a group on its segment: the C kernel, or Python alone, in the same rounds.

The engines of a group need not be of one kind. Tensors are flat, contiguous and on the CPU.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from hora.comm.backends.shm.segment import Segment

CallWords = Sequence[int]
"""What a rank says that it is about to do, the same on all ranks: kind, dtype, op, size, root; see `calls`."""


class Op(IntEnum):
    """How values are combined, with the kernel's numbers."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 4
    BAND = 5
    BOR = 6
    BXOR = 7


DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 4, torch.int8: 5, torch.int16: 6,
    torch.int32: 7, torch.int64: 8,
}  # fmt: skip
"""Types that can be combined, with the kernel's numbers. Booleans go as bytes."""

AT_ONCE_BYTES = 16 * 1024
"""Up to this size every rank adds up everything itself: one round instead of two."""


class Engine(Protocol):
    """Carries out collectives; each raises `Failed` when ranks are gone, late, or about to do something else."""

    segment: Segment

    @property
    def is_half_way(self) -> bool:
        """Whether others go by what this rank has said in a call that it has not brought to its end; not of `post`, whose other half comes later."""

    def barrier(self, call: CallWords) -> None:
        """Returns when all ranks have called it."""

    def all_reduce(self, tensor: Tensor, op: Op, call: CallWords) -> None:
        """Combines `tensor` over the ranks, in place, in the order of the ranks; half precision in float32, rounded once."""

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Op, call: CallWords) -> None:
        """Combines part r of all ranks into `output` of rank r."""

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, call: CallWords) -> None:
        """Copies `tensor` of rank r into output r of every rank, as bytes. `tensor` may be the output of its rank."""

    def post(self, tensor: Tensor, call: CallWords) -> None:
        """The first half of an all-gather of a tensor that fits into a slot: says what this rank has, and waits for nobody. `collect` comes next."""

    def collect(self, outputs: Sequence[Tensor]) -> None:
        """The second half: what all ranks have said. Its deadline counts from the first; where it was interrupted, it is called again."""

    def broadcast(self, tensor: Tensor, root: int, call: CallWords) -> None:
        """Copies `tensor` of rank `root` to all, as bytes."""

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: CallWords) -> None:
        """Copies input r into the output with this rank's number on rank r, as bytes."""

    def write(self, dst: int, data: Tensor) -> int:
        """Writes as many of the bytes `data` to rank `dst` as there is room for; how many."""

    def read(self, src: int, data: Tensor) -> int:
        """Reads into `data` what bytes rank `src` has written, up to its size; how many."""

    def set_timeout(self, timeout_s: float) -> None:
        """Of each round."""

    def close(self) -> None:
        """Leaves the group; a call in another thread ends with `Failed`."""
