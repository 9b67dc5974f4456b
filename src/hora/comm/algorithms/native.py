"""Algorithm `native`: what the backend does by itself."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora.comm.algorithms.base import Algorithm, Begun
from hora.comm.algorithms.values import as_bytes, as_numbers
from hora.comm.groups import Groups
from hora.comm.reduce_op import ReduceOp
from hora.comm.torch_private import all_gather_single, reduce_scatter_single

TORCH_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


class Native(Algorithm):
    """Hands each collective to torch.distributed."""

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        if groups.world.size() == 1:
            return ()  # in each bucket of each step: the handle that torch would give takes a GPU's host a third of a millisecond
        return _begun(dist.all_reduce(as_numbers(tensor), TORCH_OPS[op], group=groups.world, async_op=async_op))

    @override
    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        return _begun(reduce_scatter_single(as_numbers(output), as_numbers(tensor), TORCH_OPS[op], group=groups.world, async_op=async_op))

    @override
    def all_gather(self, output: Tensor, tensor: Tensor, groups: Groups, *, async_op: bool) -> Begun:
        return _begun(all_gather_single(as_bytes(output), as_bytes(tensor), group=groups.world, async_op=async_op))

    @override
    def broadcast(self, tensor: Tensor, src: int, groups: Groups, *, async_op: bool) -> Begun:
        return _begun(dist.broadcast(as_bytes(tensor), group_src=src, group=groups.world, async_op=async_op))

    @override
    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        sizes: Sequence[int],
        groups: Groups,
        *,
        async_op: bool,
    ) -> Begun:
        itemsize = tensor.element_size()
        received, sent = [size * itemsize for size in output_sizes], [size * itemsize for size in sizes]
        return _begun(dist.all_to_all_single(as_bytes(output), as_bytes(tensor), received, sent, group=groups.world, async_op=async_op))


def _begun(work: dist.Work | None) -> Begun:
    return () if work is None else (work,)
