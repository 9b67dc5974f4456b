"""Algorithm `native`: what the backend does by itself."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora.comm.algorithms.base import Algorithm, Begun
from hora.comm.reduce_op import ReduceOp
from hora.comm.torch_private import all_gather_single, reduce_scatter_single

_TORCH_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


class Native(Algorithm):
    """Hands each collective to torch.distributed."""

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: dist.ProcessGroup, *, async_op: bool) -> Begun:
        return _begun(dist.all_reduce(_numbers(tensor), _TORCH_OPS[op], group=group, async_op=async_op))

    @override
    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, group: dist.ProcessGroup, *, async_op: bool) -> Begun:
        return _begun(reduce_scatter_single(_numbers(output), _numbers(tensor), _TORCH_OPS[op], group=group, async_op=async_op))

    @override
    def all_gather(self, output: Tensor, tensor: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Begun:
        return _begun(all_gather_single(_bytes(output), _bytes(tensor), group=group, async_op=async_op))

    @override
    def broadcast(self, tensor: Tensor, src: int, group: dist.ProcessGroup, *, async_op: bool) -> Begun:
        return _begun(dist.broadcast(_bytes(tensor), src, group=group, async_op=async_op))

    @override
    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        sizes: Sequence[int],
        group: dist.ProcessGroup,
        *,
        async_op: bool,
    ) -> Begun:
        itemsize = tensor.element_size()
        received, sent = [size * itemsize for size in output_sizes], [size * itemsize for size in sizes]
        return _begun(dist.all_to_all_single(_bytes(output), _bytes(tensor), received, sent, group=group, async_op=async_op))


def _begun(work: dist.Work | None) -> Begun:
    return () if work is None else (work,)


def _numbers(tensor: Tensor) -> Tensor:
    """Gloo adds up the bytes of booleans as they are: fine for the minimum, the maximum and the product of zeros and ones."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _bytes(tensor: Tensor) -> Tensor:
    """What is only moved travels as bytes: backends refuse some types (Gloo int16, NCCL complex) that they need not look into."""
    return tensor.view(torch.uint8)
