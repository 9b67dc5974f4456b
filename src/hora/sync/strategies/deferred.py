"""Strategy `deferred`: all sums after the last backward pass, nothing hidden behind it. The oracle of the other strategies."""

from collections.abc import Sequence

from hora.sync.gradients import GradientBucket
from hora.sync.strategies import register
from hora.sync.sums import AgreedSums


@register("deferred")
class Deferred:
    """Sends one bucket after the other when backward has ended."""

    def __init__(self, buckets: Sequence[GradientBucket], sums: AgreedSums):
        self.order: Sequence[int] = range(len(buckets))
        self._sums = sums

    def begin(self) -> None:
        """Forgets the step before."""
        self._sums.begin()

    def ready(self, bucket_index: int, parameter_index: int, *, settled: bool) -> None:
        """Waits for the end."""

    def end(self) -> None:
        """Sends all buckets. Collective."""
        for bucket_index in self.order:
            self._sums.send(bucket_index)
