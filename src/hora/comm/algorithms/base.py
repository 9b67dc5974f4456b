"""What an algorithm is to Hora: how the messages of each collective go between the ranks of a session.

An algorithm gets flat contiguous tensors and the session's groups (all ranks, and by node), and returns handles of what it has begun; dtype
checks, shapes that differ, means, deadlines and errors are the business of `collectives`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from hora.comm.groups import Groups
from hora.comm.reduce_op import ReduceOp

Begun = Sequence[dist.Work]
"""Handles to wait for; none when all is done already."""


class Algorithm(ABC):
    """Begins collectives of all ranks. `async_op` False: done when the call returns, on a GPU in the order of the current stream."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        """Combines `tensor` over all ranks, in place. `op` is never MEAN."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        """Combines `tensor`, of as many parts of equal size as there are ranks, and leaves each rank its part in `output`."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor, groups: Groups, *, async_op: bool) -> Begun:
        """Puts the `tensor` of every rank, all of one size, behind one another into `output`."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int, groups: Groups, *, async_op: bool) -> Begun:
        """Overwrites `tensor` with that of `src`."""

    @abstractmethod
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
        """Sends the part of `tensor` with the number of a rank to that rank; the parts have `sizes` elements, those received `output_sizes`."""
