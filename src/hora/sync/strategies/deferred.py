"""Strategy `deferred`: all sums after the last backward pass, nothing hidden behind it. The oracle of the other strategies."""

from collections.abc import Sequence

from hora.comm.collectives import all_reduce
from hora.sync.gradients import GradientBucket
from hora.sync.strategies import register


@register("deferred")
class Deferred:
    """Packs and sums one bucket after the other when backward has ended."""

    def __init__(self, buckets: Sequence[GradientBucket]):
        self._buckets = buckets

    def begin(self) -> None:
        """Nothing to prepare."""

    def ready(self, bucket_index: int, parameter_index: int) -> None:
        """Waits for the end."""

    def end(self) -> None:
        """Sums all buckets. Collective."""
        for bucket in self._buckets:
            bucket.pack()
            all_reduce(bucket.buffer)
