"""Algorithm `recursive_doubling`: log2(n) swaps of the whole tensor, the fewest messages in a row; for small tensors.

The schedule is `plan.doubling`. Each rank sends log2(n) times the data, where a ring sends less than twice. Values are added in the dtype of the
tensor, in one tree over the ranks, the lower ranks' partial result always on the left, so that all ranks get the same bits.

All work is done when a call returns, with `async_op` too (on a GPU: in the order of the current stream).
"""

import torch
from torch import Tensor
from typing_extensions import override

from hora.comm.algorithms.base import Begun
from hora.comm.algorithms.exchange import exchange
from hora.comm.algorithms.native import Native
from hora.comm.algorithms.values import COMBINE, as_numbers
from hora.comm.groups import Groups
from hora.comm.reduce_op import ReduceOp
from hora.plan.doubling import exchanges


class RecursiveDoubling(Native):
    """All-reduce by doubling; the rest goes as in `native`."""

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        group, mine = groups.world, as_numbers(tensor)
        theirs = torch.empty_like(mine)
        for each in exchanges(group.rank(), group.size()):
            landing = theirs if each.combines else mine
            for work in exchange(mine if each.sends else None, each.peer, landing if each.receives else None, each.peer, group):
                work.wait()
            if each.combines:
                COMBINE[op](*((theirs, mine) if each.peer < group.rank() else (mine, theirs)), out=mine)
        return ()
