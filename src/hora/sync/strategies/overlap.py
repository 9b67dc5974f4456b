"""Strategy `overlap`: a bucket leaves as soon as its gradients are complete, while backward goes on.

So it does under `sharded`, whose sums and update are other ones (`sync.sharded`).

Buckets are sent in their own order on every rank, whatever the order in which they fill, so that ranks whose graphs differ (a parameter that
is used on some ranks only) still make the same calls; what has not left when backward ends leaves then.
"""

from collections.abc import Sequence

from hora.sync.gradients import GradientBucket, changed_too_late
from hora.sync.strategies import register
from hora.sync.sums import AgreedSums


@register("sharded")
@register("overlap")
class Overlap:
    """Counts the complete gradients of each bucket and sends full buckets in order."""

    def __init__(self, buckets: Sequence[GradientBucket], sums: AgreedSums):
        self._buckets = buckets
        self._sums = sums
        self._ready: list[set[int]] = [set() for _ in buckets]
        self._num_sent = 0

    def begin(self) -> None:
        """Forgets the step before."""
        self._sums.begin()
        self._num_sent = 0
        for ready in self._ready:
            ready.clear()

    def ready(self, bucket_index: int, parameter_index: int) -> None:
        """Counts one gradient and sends every bucket that is full and whose predecessors have left.

        Raises:
            CollectiveMismatch: the gradient changed after its bucket left: autograd accumulated into the parameter twice in one backward pass.
        """
        if bucket_index < self._num_sent:
            raise changed_too_late("its bucket had left")
        self._sums.take(bucket_index, parameter_index)
        self._ready[bucket_index].add(parameter_index)
        while self._num_sent < len(self._buckets) and self._full(self._num_sent):
            self._send_next()

    def end(self) -> None:
        """Sends what has not left (parameters without a gradient on this rank) and waits for all. Collective."""
        while self._num_sent < len(self._buckets):
            self._send_next()
        self._sums.finish()

    def _full(self, bucket_index: int) -> bool:
        return len(self._ready[bucket_index]) == len(self._buckets[bucket_index].parameters)

    def _send_next(self) -> None:
        self._sums.send(self._num_sent)
        self._num_sent += 1
