"""Sums of gradients in one fixed tree over logical ranks: the same bits, whoever plays which logical rank.

A rank adds up the gradients of the logical ranks that it plays as far as they make whole subtrees; these partial sums travel, each rank adds up its
chunk of all of them in the order of the tree, and the chunks are gathered: an all-to-all and an all-gather a bucket. Where the number of
ranks is a power of two a rank has one partial sum, and the bytes are those of a ring; if the GPUs share memory, one kernel does it all
(`comm.algorithms.ordered`).

Memory: one buffer as large as the gradients for each partial sum that a rank holds open, at most one a level of the tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hora.comm.flat import all_gather_flat, all_reduce_flat, all_to_all_flat
from hora.comm.session import Session
from hora.comm.work import Work
from hora.plan.logical import LogicalRanks
from hora.sync.beside import Beside
from hora.sync.gradients import GradientBucket

Partials = list[tuple[range, Tensor]]
"""Sums of consecutive logical ranks, each a whole subtree."""


@dataclass
class _Exchange:
    """One bucket on its way: its chunks in the order of the tree, then what all ranks have made of theirs.

    `sent` and `mine` are kept until both messages are done: on a GPU their memory must not be given away before.
    """

    bucket: GradientBucket
    leaves: list[range]
    chunks: Work
    sent: Tensor = field(repr=False)
    gathered: Work | None = None
    mine: Tensor | None = None


class OrderedSums:
    """The sums of all buckets, over the logical ranks of an exact session."""

    def __init__(self, buckets: Sequence[GradientBucket], here: Session):
        self._buckets = buckets
        self._logical_ranks = here.logical_ranks
        self._rank, self._world_size = here.rank, here.world_size
        self._played = self._logical_ranks.played_by(here.rank)
        self._owned = [self._logical_ranks.subtrees(rank) for rank in range(here.world_size)]
        self._partials: list[Partials] = [[] for _ in buckets]
        self._spare: list[list[Tensor]] = [[] for _ in buckets]
        self._next = [self._played.start for _ in buckets]
        self._current = self._played.start
        self._exchanges: list[_Exchange] = []
        self._calls: list[Work] = []
        self._in_one_call = is_tree_over_ranks(self._logical_ranks, self._owned) and here.groups.peer_memory(here.device) is not None
        self._beside = Beside(torch.cuda.Stream(here.device) if here.device.type == "cuda" else None)

    def begin(self) -> None:
        """Forgets what an interrupted step has left."""
        self._current = self._played.start
        for index, bucket in enumerate(self._buckets):
            bucket.begin()
            self._next[index] = self._played.start
            self._spare[index] += [partial for _, partial in self._partials[index] if partial is not bucket.buffer]
            self._partials[index] = []
        self._exchanges, self._calls = [], []

    @torch.no_grad()
    def enter(self, logical_rank: int) -> None:
        """The gradients to come are those of `logical_rank`; what there is belongs to the one before and is put aside."""
        if logical_rank != self._current:
            for index, bucket in enumerate(self._buckets):
                self._add_leaves(index, upto=logical_rank)
                for parameter in bucket.parameters:
                    parameter.grad = None
        self._current = logical_rank

    takes_early = False

    def take(self, bucket_index: int, member: int, divisor: Tensor) -> None:
        """Leaves it to `send`."""

    @torch.no_grad()
    def send(self, bucket_index: int, divisor: Tensor | None) -> None:  # noqa: ARG002 (leaves before the last are added before it is known)
        """Adds the last leaves of this rank, and begins the exchange; what was sent before goes on to its second half."""
        self._add_leaves(bucket_index, upto=self._played.stop)
        partials = self._partials[bucket_index]
        bucket = self._buckets[bucket_index]
        if self._world_size == 1:
            ((_, total),) = partials
            if total is not bucket.buffer:
                bucket.buffer.copy_(total)
            return
        with self._beside.running(()):
            if self._in_one_call:
                ((_, total),) = partials
                self._calls.append(all_reduce_flat(total, algorithm="ordered"))
                if total is not bucket.buffer:
                    bucket.buffer.copy_(total)
                return
            self._exchanges.append(self._begin_exchange(bucket, [partial for _, partial in partials]))
            for exchange in self._exchanges[-2:-1]:
                self._gather(exchange)

    @torch.no_grad()
    def arrivals(self) -> Iterator[int]:
        """Brings all exchanges to their end."""
        self._finish()
        yield from range(len(self._buckets))

    def _finish(self) -> None:
        with self._beside.running(()):
            for exchange in self._exchanges:
                self._gather(exchange)
            for exchange in self._exchanges:
                assert exchange.gathered is not None
                exchange.gathered.wait()
            for call in self._calls:
                call.wait()
        self._beside.join()
        self._exchanges, self._calls = [], []

    def _add_leaves(self, index: int, upto: int) -> None:
        """Adds the leaves before `upto` that have not been added: the current one with its gradients, others have none."""
        bucket = self._buckets[index]
        for leaf in range(self._next[index], upto):
            bucket.pack(empty=leaf != self._current)
            self._logical_ranks.push(self._partials[index], range(leaf, leaf + 1), bucket.buffer, lambda a, b: self._add(index, a, b))
            leaves, total = self._partials[index][-1]
            if total is bucket.buffer and leaf + 1 < self._played.stop:  # the next leaf needs the buffer
                kept = self._spare[index].pop() if self._spare[index] else torch.empty_like(bucket.buffer)
                self._partials[index][-1] = (leaves, kept.copy_(total))
        self._next[index] = max(upto, self._next[index])

    def _add(self, index: int, left: Tensor, right: Tensor) -> Tensor:
        if right is not self._buckets[index].buffer:
            self._spare[index].append(right)
        return left.add_(right)

    def _begin_exchange(self, bucket: GradientBucket, partials: list[Tensor]) -> _Exchange:
        chunk = bucket.buffer.numel() // self._world_size
        sent = partials[0] if len(partials) == 1 else torch.stack([partial.view(self._world_size, chunk) for partial in partials], dim=1)
        received_sizes = [len(owned) * chunk for owned in self._owned]
        received = bucket.buffer.new_empty(sum(received_sizes))
        work = all_to_all_flat(received, sent.view(-1), received_sizes, [len(partials) * chunk] * self._world_size)
        return _Exchange(bucket, [leaves for owned in self._owned for leaves in owned], work, sent)

    def _gather(self, exchange: _Exchange) -> None:
        if exchange.gathered is None:
            parts = exchange.chunks.wait().view(len(exchange.leaves), -1)
            # In place: the parts are nobody else's, and a sum into its left term has the same bits.
            exchange.mine = self._logical_ranks.total(list(zip(exchange.leaves, parts, strict=True)), torch.Tensor.add_)
            exchange.gathered = all_gather_flat(exchange.bucket.buffer, exchange.mine)


def is_tree_over_ranks(logical_ranks: LogicalRanks, owned: Sequence[Sequence[range]]) -> bool:
    """Whether each rank has one partial sum, and these are added as numbers of the ranks themselves would be."""
    if any(len(subtrees) != 1 for subtrees in owned):
        return False

    def bracket(left: object, right: object) -> object:
        return left, right

    ranks = range(len(owned))
    mine: list[tuple[range, object]] = [(owned[rank][0], rank) for rank in ranks]
    plain: list[tuple[range, object]] = [(range(rank, rank + 1), rank) for rank in ranks]
    return logical_ranks.total(mine, bracket) == LogicalRanks(len(owned), len(owned)).total(plain, bracket)
