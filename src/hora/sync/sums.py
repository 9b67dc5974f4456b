"""How the gradients of one bucket become their sum over the ranks. A strategy says when, this says how.

Relies on `GradientBucket` for what travels. In exact mode `sync.ordered` takes the place of `NativeSums`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hora import events
from hora.comm.work import Work
from hora.sync.gradients import GradientBucket


class Sums(Protocol):
    """The sums of all buckets of a step, in this order of calls."""

    def begin(self) -> None:
        """A step begins; nothing has been sent."""

    def send(self, bucket_index: int) -> None:
        """Packs a bucket whose gradients are complete on this rank, and begins to sum it. Collective: in one order on all ranks."""

    def finish(self) -> None:
        """Waits for what was sent: those buckets hold the sum over the ranks (on a GPU: on the current stream). Collective."""


class AgreedSums:
    """Calls `agree` before the first bucket is sent, and only then sends it. Everything else is `sums`' business."""

    def __init__(self, sums: Sums, agree: Callable[[], None]):
        self._sums = sums
        self._agree = agree

    def begin(self) -> None:
        """Nothing to do besides."""
        self._sums.begin()

    def send(self, bucket_index: int) -> None:
        """Agrees, then sends."""
        if bucket_index == 0:
            self._agree()
        self._sums.send(bucket_index)

    def finish(self) -> None:
        """Nothing to do besides."""
        self._sums.finish()


class NativeSums:
    """The backend's own way to sum each bucket."""

    def __init__(self, buckets: Sequence[GradientBucket]):
        self._buckets = buckets
        self._works: list[tuple[GradientBucket, Work]] = []

    def begin(self) -> None:
        """Forgets what an interrupted step has sent."""
        self._works = []
        for bucket in self._buckets:
            bucket.begin()

    def send(self, bucket_index: int) -> None:
        """Packs and begins one sum."""
        bucket = self._buckets[bucket_index]
        bucket.pack()
        self._works.append((bucket, bucket.begin_sum()))
        events.observer().on_mark(events.Mark.BUCKET_SENT, bucket.facts)

    def finish(self) -> None:
        """Waits for all of them."""
        for bucket, work in self._works:
            work.wait()
            events.observer().on_mark(events.Mark.BUCKET_SUMMED, bucket.facts)
        self._works = []
