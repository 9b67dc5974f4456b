"""Algorithm `hierarchical`: sums inside each node first, so that each byte of a node crosses the network once in each direction.

The ranks of a node reduce and scatter among themselves (in shared memory, or by `ring`), each rank then all-reduces its chunk with the
ranks of its place on the other nodes (`native`), and the chunks are gathered on the node again. Between N nodes a node sends 2(N - 1)/N of the
data, wherever its ranks stand in the order of the job; a ring over ranks dealt to nodes in turns sends as much for each rank of the node. Nodes with different numbers of
ranks reduce to one rank each, which speaks for its node. The tensor goes in segments, so that one is on the network while others are in the nodes.
With one node, or one rank on each, all goes as in `native`, and so does what is not an all-reduce.

Values are added in the dtype of the tensor; all ranks get the same bits. All work is done when a call returns, with `async_op` too (on a GPU: in the
order of the current stream). NCCL knows the nodes by itself: there `native` is the better choice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora.comm.algorithms.base import Begun
from hora.comm.algorithms.native import TORCH_OPS, Native
from hora.comm.algorithms.ring import gather_chunks, reduce_chunks
from hora.comm.algorithms.values import as_numbers
from hora.comm.groups import ByNode, Groups
from hora.comm.reduce_op import ReduceOp
from hora.comm.torch_private import all_gather_single, reduce_scatter_single

_SEGMENT_BYTES = 2 * 1024 * 1024


class Hierarchical(Native):
    """All-reduce in two levels; the rest goes as in `native`."""

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        if groups.nodes.flat:
            return super().all_reduce(tensor, op, groups, async_op=async_op)
        flat, by_node = as_numbers(tensor), groups.by_node()
        before: _Crossing | None = None
        size = by_node.inside.size() if by_node.even else 1  # the same everywhere
        for segment in flat.split(max(1, _SEGMENT_BYTES // flat.element_size() // size) * size):
            crossing = _cross(segment, op, by_node)
            if before is not None:
                before.finish()
            before = crossing
        if before is not None:
            before.finish()
        return ()


@dataclass(frozen=True)
class _Crossing:
    """A segment between the nodes, and what brings the result to all ranks of the node."""

    begun: Begun
    spread: Callable[[], object]

    def finish(self) -> None:
        for work in self.begun:
            work.wait()
        self.spread()


def _cross(segment: Tensor, op: ReduceOp, by_node: ByNode) -> _Crossing:
    """Reduces `segment` on the node and begins to reduce it across nodes."""
    inside = by_node.inside
    if by_node.even and by_node.in_memory and segment.numel() % inside.size() == 0:
        part = segment.new_empty(segment.numel() // inside.size())
        reduce_scatter_single(part, segment, TORCH_OPS[op], group=inside)
        return _Crossing(_begin_across(part, op, by_node), lambda: all_gather_single(segment, part, group=inside))
    if by_node.even:
        mine = reduce_chunks(segment, op, inside)
        return _Crossing(_begin_across(mine, op, by_node), lambda: gather_chunks(segment, inside))
    dist.reduce(segment, group_dst=0, op=TORCH_OPS[op], group=inside)
    return _Crossing(_begin_across(segment, op, by_node), lambda: dist.broadcast(segment, group_src=0, group=inside))


def _begin_across(tensor: Tensor, op: ReduceOp, by_node: ByNode) -> Begun:
    """All members of a group across nodes have as many elements, so that all of them or none have something to send."""
    if by_node.across is None or tensor.numel() == 0:
        return ()
    return (dist.all_reduce(tensor, TORCH_OPS[op], group=by_node.across, async_op=True),)
