"""All-reduces in which copy engines move the bytes: each rank fetches the others' numbers of its part, adds them up, and fetches the others' sums.

Copies between GPUs over NVLink take none of the processors that compute meanwhile, which a kernel that sums does. Where the numbers stay: in memory
that all ranks map, from the beginning, so that nobody has to put them anywhere first. Ranks meet three times a tensor, each time in a kernel of one
warp: before they fetch numbers (all have packed theirs), before they fetch sums (all have added up theirs, and so have fetched what they needed), and
behind that (nobody reads any more, so that the owner may change it).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

_FLAGS: Final = 3
_PACKED, _SUMMED, _READ = range(_FLAGS)
_FLAG_BYTES: Final = 8
_LINE: Final = 512
"""Tensors begin at multiples of so many bytes."""


class Pulled:
    """The handle of a sum that is on its way."""

    def __init__(self, arrived: torch.cuda.Event) -> None:
        self._arrived = arrived

    def wait(self) -> bool:
        """Has the current stream wait for it."""
        torch.cuda.current_stream().wait_event(self._arrived)
        return True

    def is_completed(self) -> bool:
        """Whether it is there."""
        return bool(self._arrived.query())


class Layout:
    """Where tensors lie in a rank's share of the memory: flags first.

    Args:
        numels: elements of each tensor.
        item_bytes: of each.
        world_size: of the group.
    """

    def __init__(self, numels: Sequence[int], item_bytes: Sequence[int], world_size: int) -> None:
        place = _lines(_FLAGS * world_size * _FLAG_BYTES)
        self.places: list[tuple[int, int]] = []
        for numel, size in zip(numels, item_bytes, strict=True):
            self.places.append((place, numel * size))
            place += _lines(numel * size)
        self.size_bytes = place


class Pulling:
    """The all-reduces of some tensors, each at a place of its own in the memory of all ranks.

    Calls of all ranks come in one order, and a tensor is not touched between `begin` and the end of its sum.

    Args:
        memory: the share of each rank, as tensors of bytes on this rank's device; this rank's own are zeros.
        layout: where the tensors lie.
        dtypes: of each tensor.
        rank: this one, in the group.
        timeout_s: how long a kernel waits for a rank.
        fault: int32 scalar in pinned memory; a kernel that waits too long leaves the rank it waits for there, plus 1.

    Attributes:
        tensors: this rank's, flat.
        size_bytes: of this rank's share.
    """

    def __init__(
        self, memory: Sequence[Tensor], layout: Layout, dtypes: Sequence[torch.dtype], rank: int, timeout_s: float, fault: Tensor
    ) -> None:
        self._rank, self._world_size = rank, len(memory)
        self._memory, self._fault = list(memory), fault
        self.size_bytes = layout.size_bytes
        self._limit_ns = int(timeout_s * 1e9)
        device = memory[rank].device
        self._bases = torch.tensor([share.data_ptr() for share in memory], dtype=torch.int64, device=device)
        self._counts = torch.zeros(_FLAGS, dtype=torch.int64, device=device)
        self._all = [
            [share[place : place + size].view(dtype) for share in memory]
            for (place, size), dtype in zip(layout.places, dtypes, strict=True)
        ]
        self.tensors = [of_ranks[rank] for of_ranks in self._all]
        most = max(_part(tensor.numel(), self._world_size) * tensor.element_size() for tensor in self.tensors)
        self._fetched = torch.empty(self._world_size - 1, _lines(most), dtype=torch.uint8, device=device)
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._start: Callable[..., None] | None = None

    def begin(self, index: int) -> Pulled:
        """Begins to sum tensor number `index` over the ranks, in place, in the order of the tree of algorithm `ordered`.

        Collective: all ranks call it in the same order.
        """
        if self._streams is None:
            device = self.tensors[index].device
            self._streams = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)
        summing, gathering = self._streams
        summing.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(summing):
            self._meet(_PACKED)
            self.sum_part(index)
        gathering.wait_stream(summing)
        with torch.cuda.stream(gathering):
            self._meet(_SUMMED)
            self.gather_parts(index)
            self._meet(_READ)
            return Pulled(gathering.record_event())

    def sum_part(self, index: int) -> None:
        """Fetches the others' numbers of this rank's part, when they are there, and adds all up."""
        parts = [self._part_of(share, self._rank) for share in self._all[index]]
        mine = parts[self._rank]
        if mine.numel():
            for step, room in enumerate(self._fetched, start=1):
                peer = (self._rank + step) % self._world_size
                parts[peer] = room[: mine.nbytes].view(mine.dtype).copy_(parts[peer])
            add_up(parts, mine)

    def gather_parts(self, index: int) -> None:
        """Fetches the others' sums of their parts, when they are there."""
        for step in range(1, self._world_size):
            peer = (self._rank + step) % self._world_size
            theirs = self._part_of(self._all[index][peer], peer)
            if theirs.numel():
                self._part_of(self.tensors[index], peer).copy_(theirs)

    def _part_of(self, tensor: Tensor, rank: int) -> Tensor:
        part = _part(tensor.numel(), self._world_size)
        return tensor[rank * part : (rank + 1) * part]

    def _meet(self, flag: int) -> None:
        arguments = self._bases, self._counts, flag, self._fault.data_ptr(), self._limit_ns, self._rank, self._world_size
        if self._start is None:
            from hora.comm.peer_memory import kernels

            compiled: Any = kernels.meet[1, 1, 1](*arguments, num_warps=1)
            self._start = compiled[1, 1, 1]
        else:
            self._start(*arguments)


def add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """Adds neighbours up in pairs, these in pairs, and so on, into `out`, which is one of `parts`; the others are overwritten too."""
    left = list(parts)
    while len(left) > 1:
        pairs = [left[at : at + 2] for at in range(0, len(left), 2)]
        left = [torch.add(*pair, out=out if len(pairs) == 1 else pair[0]) if len(pair) == 2 else pair[0] for pair in pairs]


def _part(numel: int, world_size: int) -> int:
    """Elements of a rank's part; the last ranks may have fewer, or none."""
    part = -(-numel // world_size)
    return part + -part % 64


def _lines(size_bytes: int) -> int:
    return size_bytes + -size_bytes % _LINE
