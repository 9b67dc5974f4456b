"""A rank's view of the memory that the GPUs of a group share, and the all-reduces in it."""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hora.comm.deadline import Deadline
from hora.comm.reduce_op import ReduceOp
from hora.errors import ConfigError

MOST_RANKS: Final = 8
"""How many the kernels add up."""

DTYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64})

MOST_BLOCKS: Final = 64
"""Blocks of a kernel at most: with half of them NVLink is not full, and all of them together leave half of an H200 to others."""
_SLOT_BYTES: Final = 128 * 1024
_SLOTS: Final = 8
_FLAGS: Final = 2  # kernels.PUT, kernels.SUMMED
_FLAG_BYTES: Final = 8
_PAGE: Final = 4096

_POLL_S: Final = 1e-3
_MOST_COMPILED: Final = 4096
_ALIGNED: Final = 16
_GRAIN: Final = 16
"""Whole multiples of so many elements are read and written 16 bytes at a time; what is left over goes in a call of its own."""
_LEAST: Final = 512
"""Elements that a block takes at least: fewer make no less work for it."""
_LONG: Final = 8192
"""From so many elements a block on, 1024 threads take so many at once."""
_SHORT: Final = 2048

_SYNC_BYTES: Final = 1 << 20
"""What a GPU could have read from another one in the time in which all wait for all once more: 3 us on H200s."""


def window_bytes(world_size: int, blocks: int) -> int:
    """Bytes of a rank's share of a window: flags, then slots."""
    return flag_bytes(world_size, blocks) + blocks * _SLOTS * _SLOT_BYTES


def flag_bytes(world_size: int, blocks: int) -> int:
    """Bytes of the flags, in whole pages."""
    used = _FLAGS * blocks * world_size * _FLAG_BYTES
    return used + -used % _PAGE


def reads_all(size_bytes: int, world_size: int) -> bool:
    """Whether every rank had better read all numbers of all (one wait for the others), or sum a part and read the other parts (two)."""
    surplus = (world_size - 1) * (1 - 2 / world_size)  # in tensors that a GPU reads more
    return surplus * size_bytes <= _SYNC_BYTES


class Window:
    """Memory of the same size on every rank of a group, mapped into all of them, and how far this rank has got in it.

    Calls of all ranks come in one order, and those of one rank one after the other on its GPU.

    Args:
        memory: this rank's share, `[window_bytes]` of zeros on its GPU.
        blocks: of a kernel at most, the same on all ranks.
        addresses: where the share of each rank is mapped here, by rank.
        rank: this one, in the group.
        timeout_s: how long a kernel waits for a rank.
        fault: int32 scalar in pinned memory; a kernel that waits too long leaves the rank it waits for there, plus 1.
    """

    def __init__(self, memory: Tensor, blocks: int, addresses: Sequence[int], rank: int, timeout_s: float, fault: Tensor) -> None:
        self._memory, self._blocks = memory, blocks
        self._rank, self._world_size = rank, len(addresses)
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._epochs = torch.zeros(blocks, dtype=torch.int64, device=memory.device)
        self._limit_ns = int(timeout_s * 1e9)
        self._flag_bytes = flag_bytes(self._world_size, blocks)
        self._fault, self._fault_address = fault, fault.data_ptr()
        self._compiled: dict[tuple[_Launch, torch.dtype, bool], Callable[..., None]] = {}

    def all_reduce(self, tensor: Tensor, *, read_all: bool | None = None) -> None:
        """Sums `tensor`, flat and contiguous, of one of `DTYPES`, in place, on the current stream of the current device, which is its own.

        Collective.

        Args:
            tensor: of the same length on all ranks.
            read_all: the way it goes, by default as `reads_all` says; the same on all ranks.
        """
        for launch in _launches(tensor.numel(), tensor.element_size(), self._world_size, self._blocks, read_all):
            part = tensor if launch.whole else tensor[launch.begin : launch.begin + launch.numel]
            # Triton compiles for types and for whether addresses are aligned; to look that up each time takes twice as long as to start a kernel.
            key = launch, part.dtype, part.data_ptr() % _ALIGNED == 0
            if start := self._compiled.get(key):
                start(*self._arguments(part, launch))
            else:
                if len(self._compiled) >= _MOST_COMPILED:  # a job whose tensors are of ever new lengths
                    self._compiled.clear()
                self._compiled[key] = self._compile(part, launch)

    def _arguments(self, tensor: Tensor, launch: "_Launch") -> tuple[Any, ...]:
        return (
            tensor, self._addresses, self._epochs, self._fault_address, self._limit_ns, launch.numel, launch.part,
            self._rank, self._world_size, self._blocks, self._flag_bytes, _SLOTS, _SLOT_BYTES, launch.stride,
        )  # fmt: skip

    def _compile(self, tensor: Tensor, launch: "_Launch") -> Callable[..., None]:
        """Starts the kernel, compiled if need be; returns what starts it again.

        Raises:
            ConfigError: a graph is being captured, into which nothing can be loaded.
        """
        from hora.comm.peer_memory import kernels

        grid = launch.blocks, 1, 1
        kernel = kernels.one_shot if launch.read_all else kernels.two_shot
        try:
            compiled = kernel[grid](*self._arguments(tensor, launch), num_warps=launch.warps)
        except RuntimeError as error:
            if not torch.cuda.is_current_stream_capturing():
                raise
            raise ConfigError(
                f"a sum in a CUDA graph must have been made outside of one before, but none of {tensor.numel()} elements of {tensor.dtype} was; "
                "run the step once before it is captured"
            ) from error
        again: Callable[..., None] = compiled[grid]
        return again


class _Launch(NamedTuple):
    """A kernel for some elements of a tensor: `part` elements a rank (or, where each reads all, in all) for a block at once."""

    begin: int
    numel: int
    whole: bool
    read_all: bool
    blocks: int
    part: int
    stride: int
    warps: int


@lru_cache(maxsize=_MOST_COMPILED)
def _launches(numel: int, item_bytes: int, world_size: int, blocks: int, read_all: bool | None) -> Sequence[_Launch]:
    """The kernels that sum a tensor of `numel` elements."""
    rest = numel % _GRAIN
    pieces = [(0, numel - rest), (numel - rest, rest)]
    launches = []
    for begin, count in pieces:
        if count > 0:
            all_at_once = reads_all(count * item_bytes, world_size) if read_all is None else read_all
            shares = 1 if all_at_once else world_size
            most = _SLOT_BYTES // item_bytes // shares // _GRAIN * _GRAIN
            part = min(most, -(-count // (blocks * shares * _LEAST)) * _LEAST)
            # Blocks of 1024 threads only on a GPU that has room for all of them beside others.
            stride, warps = (_LONG, 32) if part >= _LONG and blocks >= MOST_BLOCKS else (_SHORT, 16)
            used = min(blocks, -(-count // (part * shares)))
            launches.append(_Launch(begin, count, count == numel, all_at_once, used, part, stride, warps))
    return launches


class PeerMemory:
    """The all-reduces of a group in shared memory of its GPUs.

    CUDA graphs have a window of their own, since a graph may be replayed while other calls are on their way; two graphs of one group must not run at
    the same time, as with NCCL.

    Args:
        calls: for calls that are carried out as they are made.
        captured: for those that are captured into graphs.
        fault: what both windows share.
    """

    def __init__(self, calls: Window, captured: Window, fault: Tensor) -> None:
        self._calls, self._captured, self.fault = calls, captured, fault
        self._last: torch.cuda.Stream | None = None
        self._last_captured: torch.cuda.Stream | None = None
        self._done = torch.cuda.Event()

    @staticmethod
    def takes(tensor: Tensor, op: ReduceOp) -> bool:
        """Whether the kernels know how to do it."""
        return op is ReduceOp.SUM and tensor.dtype in DTYPES and tensor.numel() > 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums `tensor`, flat and contiguous, in place, in the order of the current stream: with the bits of algorithm `ordered`.

        Collective: all ranks of the group call it in the same order.
        """
        if torch.cuda.current_device() != tensor.device.index:  # in a thread of the user's
            with torch.cuda.device(tensor.device):
                self.all_reduce(tensor)
            return
        stream = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing():
            if self._last_captured is not None and self._last_captured != stream and _is_capturing(self._last_captured):
                stream.wait_stream(self._last_captured)
            self._last_captured = stream
            self._captured.all_reduce(tensor)
            return
        if self._last != stream:
            stream.wait_event(self._done)  # one call after the other
        self._last = stream
        self._calls.all_reduce(tensor)
        self._done.record(stream)

    def has_ended(self, timeout_s: float) -> bool:
        """Whether the last call has ended on the GPU, or ends within `timeout_s`."""
        deadline = Deadline(timeout_s)
        try:
            while not self._done.query() and not deadline.passed:
                time.sleep(_POLL_S)
        except RuntimeError:
            return True  # with an error of the GPU's
        return not deadline.passed

    @property
    def overdue(self) -> int | None:
        """The rank of the group that a kernel has waited for in vain; None while all have come."""
        peer = int(self.fault)
        return peer - 1 if peer else None


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
