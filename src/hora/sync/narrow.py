"""Sums of gradients that travel as bfloat16 or float16 and are added up in the gradients' own type: half the bytes, or a quarter.

A rank rounds its gradients and sends every other one its chunk, adds up what it gets in the order of the ranks, and sends the rounded sum to all:
an all-to-all and an all-gather a bucket, as in `comm.algorithms.compressed`, which is the oracle. A value is rounded twice whatever the number of
ranks, and all ranks get the same bits. Under strategy "sharded" the second half is left out, and the second rounding with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from hora import events
from hora.comm.backends.queued import QueuedGroup
from hora.comm.flat import all_gather_flat, all_to_all_flat
from hora.comm.session import Session
from hora.comm.work import Work
from hora.sync.beside import Beside
from hora.sync.gradients import GradientBucket
from hora.sync.sums import NativeSums

_WIDE = (torch.float32, torch.float64)


@dataclass
class _Exchange:
    """One bucket on its way: the chunks of all ranks that this one adds up, then the sums of all chunks.

    `sent` and `mine` are kept until both messages are done: on a GPU their memory must not be given away before.
    """

    chunks: Work
    sent: Tensor = field(repr=False)
    mine: Tensor | None = None
    gathered: Work | None = None


class NarrowSums(NativeSums):
    """The sums of all buckets, travelling as `wire_dtype`; buckets that are as narrow already travel as they are."""

    def __init__(self, buckets: Sequence[GradientBucket], wire_dtype: torch.dtype, here: Session):
        super().__init__(buckets)
        self._wire_dtype = wire_dtype
        self._world_size = here.world_size
        self._under_way: list[tuple[int, Work | _Exchange]] = []
        self._beside = Beside(torch.cuda.Stream(here.device) if here.device.type == "cuda" else None)
        for bucket in buckets:
            bucket.travels_narrow = self._narrows(bucket)

    @override
    def begin(self) -> None:
        super().begin()
        self._under_way = []

    @override
    @torch.no_grad()
    def send(self, bucket_index: int, divisor: Tensor | None) -> None:
        """Packs what is left of a bucket and begins its exchange; what was sent before goes on to its second half."""
        bucket = self._buckets[bucket_index]
        bucket.pack(divisor)
        if bucket.travels_narrow:
            with self._beside.running(()):
                self._under_way.append((bucket_index, self._begin_exchange(bucket)))
                for index, earlier in self._under_way[-2:-1]:
                    self._go_on(self._buckets[index], earlier)
        else:
            self._under_way.append((bucket_index, bucket.begin_sum()))
        events.observer().on_mark(events.Mark.BUCKET_SENT, bucket.facts)

    @override
    @torch.no_grad()
    def arrivals(self) -> Iterator[int]:
        """Brings one exchange after the other to its end, the next one being on its way."""
        under_way, self._under_way = self._under_way, []
        for place, (bucket_index, exchange) in enumerate(under_way):
            bucket = self._buckets[bucket_index]
            if isinstance(exchange, _Exchange):
                with self._beside.running(()):
                    for index, coming in under_way[place : place + 2]:
                        self._go_on(self._buckets[index], coming)
                    _put(exchange, bucket)
                self._beside.join()
            else:
                exchange.wait()
            events.observer().on_mark(events.Mark.BUCKET_SUMMED, bucket.facts)
            yield bucket_index

    def _narrows(self, bucket: GradientBucket) -> bool:
        return self._world_size > 1 and bucket.buffer.dtype in _WIDE

    def _begin_exchange(self, bucket: GradientBucket) -> _Exchange:
        sent = bucket.buffer.to(self._wire_dtype)
        sizes = [sent.numel() // self._world_size] * self._world_size
        return _Exchange(all_to_all_flat(torch.empty_like(sent), sent, sizes, sizes), sent)

    def _go_on(self, bucket: GradientBucket, exchange: Work | _Exchange) -> None:
        """Adds up this rank's chunk, and begins to give it to all, unless that has been done."""
        if isinstance(exchange, _Exchange) and exchange.mine is None:
            total = exchange.chunks.wait().view(self._world_size, -1).to(bucket.buffer.dtype).sum(0)
            exchange.mine = total if bucket.dealt_out else total.to(self._wire_dtype)
            if not bucket.dealt_out:
                exchange.gathered = all_gather_flat(torch.empty_like(exchange.sent), exchange.mine)


def make_sums(buckets: Sequence[GradientBucket], wire_dtype: torch.dtype | None, here: Session) -> NativeSums:
    """The sums of `buckets`, which travel as `wire_dtype`, or without it as they are."""
    if wire_dtype is None:
        return NativeSums(buckets, in_threads=isinstance(here.group, QueuedGroup))
    return NarrowSums(buckets, wire_dtype, here)


def _put(exchange: _Exchange, bucket: GradientBucket) -> None:
    """Leaves the sums where the bucket has them."""
    if exchange.gathered is None:
        assert exchange.mine is not None
        bucket.sums.copy_(exchange.mine)
    else:
        bucket.buffer.copy_(exchange.gathered.wait())
