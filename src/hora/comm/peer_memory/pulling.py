"""All-reduces in which copy engines move the bytes: each rank fetches the others' numbers of its part, adds them up, and fetches the others' sums.

Copies between GPUs over NVLink take none of the processors that compute meanwhile, which a kernel that sums does. Where the numbers stay: in memory
that all ranks map, from the beginning, so that nobody has to put them anywhere first. Ranks meet three times a tensor, each time in a kernel of one
warp: before they fetch numbers (all have packed theirs), before they fetch sums (all have added up theirs, and so have fetched what they needed), and
behind that (nobody reads any more, so that the owner may change it).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hora.plan.logical import LogicalRanks

PULLED_DTYPES: Final = frozenset({torch.bfloat16, torch.float32, torch.float64})
"""Not float16, in which a gradient, or a mark of one, that is divided by the weight of a large batch would be zero."""

_MOST_NUMEL: Final = 2**31
_FLAGS: Final = 3
_PACKED, _SUMMED, _READ = range(_FLAGS)
_FLAG_BYTES: Final = 8
_LINE: Final = 512
"""Tensors begin at multiples of so many bytes."""
_GRAIN: Final = 64
"""Parts are whole multiples of so many elements, which at 8 bytes fill a line."""
_STRIDE: Final = 2048
"""Elements that a block of the kernel that adds up takes, in 8 warps."""


class Pulled:
    """The handle of a sum that is on its way."""

    def __init__(self, arrived: torch.cuda.Event, device: torch.device) -> None:
        self._arrived = arrived
        self._device = device

    def wait(self) -> bool:
        """Has the current stream of its device wait for it."""
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return True

    def is_completed(self) -> bool:
        """Whether it is there."""
        return bool(self._arrived.query())


@dataclass(frozen=True)
class Divisor:
    """What sums are divided by on their way: a float64 scalar on the device, which is there when `known` is."""

    value: Tensor
    known: torch.cuda.Event


class Layout:
    """Where tensors lie in a rank's share of the memory: flags first.

    Args:
        numels: elements of each tensor.
        dtypes: of each.
        world_size: of the group.

    Attributes:
        places: first byte and number of bytes of each tensor.
        size_bytes: of a share.
    """

    def __init__(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], world_size: int) -> None:
        self.dtypes = list(dtypes)
        self.places: list[tuple[int, int]] = []
        place = _lines(_FLAGS * world_size * _FLAG_BYTES)
        for numel, dtype in zip(numels, dtypes, strict=True):
            self.places.append((place, numel * dtype.itemsize))
            place += _lines(numel * dtype.itemsize)
        self.size_bytes = place


class Pulling:
    """The all-reduces of some tensors, each at a place of its own in the memory of all ranks.

    Calls of all ranks come in one order, and a tensor is not touched between `begin` and the end of its sum.

    Args:
        memory: the share of each rank, as tensors of bytes on this rank's device; this rank's own are zeros.
        layout: where the tensors, of `PULLED_DTYPES`, lie.
        rank: this one, in the group.
        timeout_s: how long a kernel waits for a rank.
        fault: int32 scalar in pinned memory; a kernel that waits too long leaves the rank it waits for there, plus 1.

    Attributes:
        tensors: this rank's, flat.
        size_bytes: of this rank's share.
    """

    def __init__(self, memory: Sequence[Tensor], layout: Layout, rank: int, timeout_s: float, fault: Tensor) -> None:
        self._rank, self._world_size = rank, len(memory)
        self._memory, self._fault = list(memory), fault
        self._limit_ns = int(timeout_s * 1e9)
        self.size_bytes = layout.size_bytes
        device = memory[rank].device
        # By tensor, then by rank.
        self._all = [
            [share[place : place + size].view(dtype) for share in memory]
            for (place, size), dtype in zip(layout.places, layout.dtypes, strict=True)
        ]
        self.tensors = [of_ranks[rank] for of_ranks in self._all]
        most = max(part_numel(tensor.numel(), self._world_size) * tensor.element_size() for tensor in self.tensors)
        self._fetched = torch.empty(self._world_size - 1, _lines(most), dtype=torch.uint8, device=device)
        self._addends = [[self._addend(tensor, peer) for peer in range(self._world_size)] for tensor in self.tensors]
        self._bases = torch.tensor([share.data_ptr() for share in memory], dtype=torch.int64, device=device)
        spare = [0] * (self._world_size % 2)  # the kernel is compiled for rows that begin at multiples of 16 bytes
        rows = [[*(part.data_ptr() for part in parts), *spare] for parts in self._addends]
        self._addresses = torch.tensor(rows, dtype=torch.int64, device=device)
        self._counts = torch.zeros(_FLAGS, dtype=torch.int64, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._meet_again: Callable[..., None] | None = None
        self._add_again: dict[torch.dtype, Any] = {}

    def begin(self, index: int, divisor: Divisor | None = None) -> Pulled:
        """Begins to sum tensor number `index` over the ranks, in place, in the order of the tree of algorithm `ordered`, and to divide the sums.

        Collective: all ranks call it in the same order; the first call for a type is made outside of CUDA graphs.
        """
        device = self.tensors[index].device
        if self._streams is None:
            self._streams = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)
        summing, gathering = self._streams
        summing.wait_stream(torch.cuda.current_stream(device))
        if divisor is not None:  # before ranks meet, so that all of them wait for NCCL and for each other in one order
            summing.wait_event(divisor.known)
        with torch.cuda.stream(summing):
            self._meet(_PACKED)
            self.fetch_parts(index)
            self._add_up(index, self._one if divisor is None else divisor.value)
        gathering.wait_stream(summing)
        with torch.cuda.stream(gathering):
            self._meet(_SUMMED)
            self.gather_parts(index)
            self._meet(_READ)
            return Pulled(gathering.record_event(), device)

    def adds_up(self) -> bool:
        """Whether the first sum of each type is right; the tensors are zeros again then. Collective."""
        right = True
        for dtype in sorted({tensor.dtype for tensor in self.tensors}, key=str):
            index = next(index for index, tensor in enumerate(self.tensors) if tensor.dtype is dtype)
            tensor = self.tensors[index].fill_(self._rank + 1)
            self.begin(index).wait()
            right &= bool((tensor == sum(range(1, self._world_size + 1))).all())
            tensor.zero_()
        return right

    def fetch_parts(self, index: int) -> None:
        """Fetches the others' numbers of this rank's part, when they are there."""
        for peer in self._peers():
            addend = self._addends[index][peer]
            if addend.numel():
                addend.copy_(self._part_of(self._all[index][peer], self._rank))

    def add_parts(self, index: int, divisor: Tensor) -> None:
        """The oracle of the kernel with which `begin` adds up what was fetched and divides it, by a float64 scalar."""
        parts = [(range(rank, rank + 1), part) for rank, part in enumerate(self._addends[index])]
        total = LogicalRanks(self._world_size, self._world_size).total(parts, torch.add)
        self._addends[index][self._rank].copy_((total.float() if total.dtype is torch.bfloat16 else total) / divisor)

    def gather_parts(self, index: int) -> None:
        """Fetches the others' sums of their parts, when they are there."""
        for peer in self._peers():
            theirs = self._part_of(self._all[index][peer], peer)
            if theirs.numel():
                self._part_of(self.tensors[index], peer).copy_(theirs)

    def _peers(self) -> list[int]:
        """The others, the next one first, so that no two ranks begin with the same one."""
        return [(self._rank + step) % self._world_size for step in range(1, self._world_size)]

    def _addend(self, tensor: Tensor, peer: int) -> Tensor:
        """Where `peer`'s numbers of this rank's part are when they are added up: this rank's own in their place."""
        mine = self._part_of(tensor, self._rank)
        return mine if peer == self._rank else self._fetched[(peer - self._rank) % self._world_size - 1, : mine.nbytes].view(mine.dtype)

    def _part_of(self, tensor: Tensor, rank: int) -> Tensor:
        part = part_numel(tensor.numel(), self._world_size)
        return tensor[rank * part : (rank + 1) * part]

    def _meet(self, flag: int) -> None:
        arguments = self._bases, self._counts, flag, self._fault.data_ptr(), self._limit_ns, self._rank, self._world_size
        if self._meet_again is None:  # Triton takes twice as long to look it up as to start it
            from hora.comm.peer_memory import kernels

            compiled: Any = kernels.meet[1, 1, 1](*arguments, num_warps=1)
            self._meet_again = compiled[1, 1, 1]
        else:
            self._meet_again(*arguments)

    def _add_up(self, index: int, divisor: Tensor) -> None:
        mine = self._addends[index][self._rank]
        if not mine.numel():
            return
        numel = mine.numel() + -mine.numel() % _GRAIN  # the last line is this tensor's to its end
        grid = -(-numel // _STRIDE), 1, 1
        arguments = mine, self._addresses[index], divisor, numel, self._world_size, _STRIDE
        if mine.dtype in self._add_again:
            self._add_again[mine.dtype][grid](*arguments)
        else:
            from hora.comm.peer_memory import kernels

            self._add_again[mine.dtype] = kernels.add_up[grid](*arguments, num_warps=8)


def can_be_pulled(tensor: Tensor) -> bool:
    """Whether the kernel that adds up knows how to do it."""
    return tensor.dtype in PULLED_DTYPES and tensor.numel() < _MOST_NUMEL


def part_numel(numel: int, world_size: int) -> int:
    """Elements of a rank's part; the last ranks may have fewer, or none."""
    part = -(-numel // world_size)
    return part + -part % _GRAIN


def _lines(size_bytes: int) -> int:
    return size_bytes + -size_bytes % _LINE
