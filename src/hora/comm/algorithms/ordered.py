"""Algorithm `ordered`: sums in one fixed binary tree, so that their bits depend neither on the backend nor on who adds what.

Each rank sends every other one its chunk, adds up the chunks that it gets in the order of the tree, and sends the sum to all: an all-to-all and
an all-gather, the bytes of a ring (Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005). GPUs that
share memory do so in one kernel (`symmetric`), with the same bits. Exact mode does the same with partial sums of several leaves a rank, bucket
by bucket (`sync.ordered`).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from hora.comm.algorithms.base import Begun
from hora.comm.algorithms.native import Native
from hora.comm.algorithms.symmetric import sum_in_peer_memory
from hora.comm.groups import Groups
from hora.comm.reduce_op import ReduceOp
from hora.plan.logical import LogicalRanks

_COMBINE: Mapping[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {ReduceOp.SUM: torch.add, ReduceOp.PRODUCT: torch.mul}


class Ordered(Native):
    """Sums and products in the order of the tree; what has no order goes as in `native`."""

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        size = groups.world.size()
        if op not in _COMBINE or size == 1 or tensor.numel() == 0:
            return super().all_reduce(tensor, op, groups, async_op=async_op)
        if sum_in_peer_memory(tensor, op, groups):
            return ()
        chunk = -(-tensor.numel() // size)
        sent = torch.nn.functional.pad(tensor, (0, chunk * size - tensor.numel()))
        received = torch.empty_like(sent)
        self.all_to_all(received, sent, [chunk] * size, [chunk] * size, groups, async_op=False)
        parts = [(range(rank, rank + 1), part) for rank, part in enumerate(received.view(size, chunk))]
        mine = LogicalRanks(size, size).total(parts, _COMBINE[op])
        self.all_gather(sent, mine.contiguous(), groups, async_op=False)
        tensor.copy_(sent[: tensor.numel()])
        return ()
