"""Solo: a world of one rank. Every collective is the identity, on any device, without a socket or a thread.

torch.distributed is initialised with it, so that a process alone runs the same code as a thousand do, DistributedDataParallel included.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora.comm.backends.base import Backend
from hora.comm.backends.python_group import PythonGroup
from hora.comm.torch_private import Store, completed_work


class SoloGroup(PythonGroup):
    """The process group of one rank: what is sent is received at once."""

    device_types = ("cpu", "cuda")

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:  # noqa: ARG002 (torch's signature)
        assert (rank, size) == (0, 1), f"solo serves one rank, not rank {rank} of {size}"
        super().__init__(rank, size)
        self._mailbox: dict[int, list[Tensor]] = {}

    @override
    def getBackendName(self) -> str:
        return "solo"

    @override
    def allreduce(self, tensors: Any, *_: Any, **__: Any) -> dist.Work:
        return _done(tensors)

    allreduce_coalesced = broadcast = reduce = allreduce

    @override
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *_: Any) -> dist.Work:
        for received, sent in zip(outputs, inputs, strict=True):
            received[0].copy_(sent)
        return _done(outputs)

    gather = allgather

    @override
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *_: Any) -> dist.Work:
        for received, sent in zip(outputs, inputs, strict=True):
            received.copy_(sent[0])
        return _done(outputs)

    reduce_scatter = scatter

    @override
    def all_gather_single(self, output: Tensor, sent: Tensor, *_: Any) -> dist.Work:
        output.view(-1).copy_(sent.reshape(-1))
        return _done(output)

    reduce_scatter_single = _allgather_base = _reduce_scatter_base = all_gather_single
    all_to_all_single = alltoall_base = all_gather_single

    @override
    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: Any) -> dist.Work:
        for output, sent in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, sent)
        return _done(outputs)

    reduce_scatter_single_coalesced = allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = alltoall = all_gather_single_coalesced

    @override
    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        return _done([])

    @override
    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Returns at once: nobody else can be late."""

    @override
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        self._mailbox.setdefault(tag, []).append(tensors[0].clone())
        return _done(tensors)

    @override
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        letters = self._mailbox.get(tag)
        if not letters:
            raise RuntimeError(f"a rank alone can receive only what it has sent to itself; nothing was sent with tag {tag}")
        tensors[0].copy_(letters.pop(0))
        return _done(tensors)

    @override
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        return self.recv(tensors, 0, tag)

    @override
    def shutdown(self) -> None:
        self._mailbox.clear()

    abort = shutdown


def _done(result: Any) -> dist.Work:
    return completed_work(result, next(_tensors(result), torch.empty(0, device="cpu")).device)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    else:
        for branch in tree:
            yield from _tensors(branch)


class Solo(Backend):
    """Serves a world of one."""

    name = "solo"
    device_types = ("cpu", "cuda")

    @override
    def unavailable_because(self, world_size: int) -> str | None:
        return None if world_size == 1 else "it serves one rank alone"

    @override
    def start_group(self, store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        if self.name not in dist.Backend.backend_list:
            dist.Backend.register_backend(self.name, SoloGroup, devices=["cpu", "cuda"])
        super().start_group(store, rank, world_size, device, timeout_s)
