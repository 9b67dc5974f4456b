"""Algorithm `symmetric`: GPUs of one host add up in memory that each maps of all others, over NVLink, in a kernel of ours (`comm.peer_memory`).

For small tensors it is the faster the more of NCCL's time is spent on messages; it adds in the tree of `ordered`, so that it has the same bits. It
serves up to 8 GPUs with NVLink between them, all ranks of the job; elsewhere, and for what is not a sum, all goes as in `native`. The memory is
mapped by the first call, which cannot be in a CUDA graph.
"""

from torch import Tensor
from typing_extensions import override

from hora.comm.algorithms.base import Begun
from hora.comm.algorithms.native import Native
from hora.comm.groups import Groups
from hora.comm.reduce_op import ReduceOp


class Symmetric(Native):
    """Sums in memory of all GPUs; the rest goes as in `native`. All is done in the order of the current stream when a call returns."""

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        if not sum_in_peer_memory(tensor, op, groups):
            return super().all_reduce(tensor, op, groups, async_op=async_op)
        return ()


def sum_in_peer_memory(tensor: Tensor, op: ReduceOp, groups: Groups) -> bool:
    """Sums `tensor` over the ranks, in place, in the order of the tree of `ordered`, if their GPUs share memory; whether that was so.

    Collective: all ranks call it.
    """
    memory = groups.peer_memory(tensor.device)
    if memory is None or not memory.takes(tensor, op):
        return False
    memory.all_reduce(tensor)
    return True
