"""Strategy `overlap`: a bucket leaves as soon as its gradients are complete, while backward goes on.

So it does under `sharded`, whose sums and update are other ones (`sync.sharded`).

Buckets are sent in their own order on every rank, whatever the order in which they fill, so that ranks whose graphs differ (a parameter that
is used on some ranks only) still make the same calls; what has not left when backward ends leaves then.
"""

from collections.abc import Sequence

from hora.errors import CollectiveMismatch
from hora.sync.gradients import GradientBucket
from hora.sync.strategies import register
from hora.sync.sums import AgreedSums


@register("sharded")
@register("overlap")
class Overlap:
    """Counts the complete gradients of each bucket and sends full buckets in order.

    One whose parameter has hooks that run after ours is complete when the next one comes.
    """

    def __init__(self, buckets: Sequence[GradientBucket], sums: AgreedSums):
        self._sums = sums
        self.order: Sequence[int] = range(len(buckets))
        self._sizes = [len(bucket.parameters) for bucket in buckets]
        self._ready: list[set[int]] = [set() for _ in buckets]
        self._has_left = [False] * len(buckets)
        self._num_sent = 0
        self._latest: tuple[int, int] | None = None

    def begin(self) -> None:
        """Forgets the step before."""
        self._sums.begin()
        self._has_left = [False] * len(self._sizes)
        self._num_sent = 0
        self._latest = None
        for ready in self._ready:
            ready.clear()

    def ready(self, bucket_index: int, parameter_index: int, *, settled: bool) -> None:
        """Counts one gradient and sends every bucket that is full and whose predecessors have left.

        Raises:
            CollectiveMismatch: the gradient changed after its bucket left: autograd accumulated into the parameter twice in one backward pass.
        """
        if self._has_left[bucket_index]:
            raise CollectiveMismatch(
                "a gradient must be complete when it is first accumulated, but one changed after its bucket had left; with "
                'torch.utils.checkpoint pass use_reentrant=False, or choose strategy="deferred"'
            )
        if self._latest is not None:
            self._take_latest()
        if settled:
            self._take(bucket_index, parameter_index)
        else:
            self._latest = bucket_index, parameter_index

    def end(self) -> None:
        """Sends what has not left (parameters without a gradient on this rank). Collective."""
        self._take_latest()
        while self._num_sent < len(self._sizes):
            self._send_next()

    def _take_latest(self) -> None:
        latest, self._latest = self._latest, None
        if latest is not None:
            self._take(*latest)

    def _take(self, bucket_index: int, parameter_index: int) -> None:
        self._sums.take(bucket_index, parameter_index)
        ready = self._ready[bucket_index]
        ready.add(parameter_index)
        if len(ready) == self._sizes[bucket_index]:
            while self._num_sent < len(self._sizes) and self._is_full(self.order[self._num_sent]):
                self._send_next()

    def _is_full(self, bucket_index: int) -> bool:
        return len(self._ready[bucket_index]) == self._sizes[bucket_index]

    def _send_next(self) -> None:
        bucket_index = self.order[self._num_sent]
        self._sums.send(bucket_index)
        self._has_left[bucket_index] = True
        self._num_sent += 1
