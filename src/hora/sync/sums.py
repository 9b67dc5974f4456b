"""How the gradients of one bucket become their sum over the ranks. A strategy says when, this says how.

Relies on `GradientBucket` for what travels. In exact mode `sync.ordered` takes the place of `NativeSums`.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from hora import events
from hora.comm.flat import pull_sum
from hora.comm.peer_memory import Divisor, Pulling, can_be_pulled
from hora.comm.session import Session
from hora.comm.work import Work
from hora.sync.gradients import GradientBucket

_LEAST_PULLED_BYTES = 16 * 2**20
"""Size of buckets, on average, from which on copy engines move them: with 102 MB in 4 a step takes 1 % less so, with 264 MB in 3 3 %, with 19 MB in 2
1.6 % more (2 H200s)."""


class Sums(Protocol):
    """The sums of all buckets of a step, in this order of calls."""

    def begin(self) -> None:
        """A step begins; nothing has been sent."""

    @property
    def takes_early(self) -> bool:
        """Whether `take` does anything."""

    def take(self, bucket_index: int, member: int, divisor: Tensor) -> None:
        """Packs one gradient that is complete on this rank, `divisor` being what the sums will be divided by."""

    def send(self, bucket_index: int, divisor: Tensor | None) -> None:
        """Packs a bucket whose gradients are complete on this rank, and begins to sum it. Collective: in one order on all ranks.

        `divisor`: what the sums will be divided by, if that is known; they may be divided from the beginning then.
        """

    def arrivals(self) -> Iterator[int]:
        """Waits for what was sent, and yields each bucket's index once it holds the sum over the ranks (on a GPU: on the current stream).

        Collective: all ranks go to the end.
        """


class AgreedSums:
    """Calls `agree` before anything is sent or divided, which may tell the divisor, and only then has `sums` do its business; calls `sent` with the
    number of each bucket that has left.
    """

    def __init__(self, sums: Sums, agree: Callable[[], Tensor | None], sent: Callable[[int], None]):
        self._sums = sums
        self._agree = agree
        self._sent = sent
        self._agreed = False
        self._divisor: Tensor | None = None

    def begin(self) -> None:
        """The last backward begins, in which nothing has been agreed on."""
        self._agreed = False

    def take(self, bucket_index: int, member: int) -> None:
        """Agrees, then packs one gradient, if that is of use."""
        if self._sums.takes_early and (divisor := self._find_divisor()) is not None:
            self._sums.take(bucket_index, member, divisor)

    def send(self, bucket_index: int) -> None:
        """Agrees, then sends."""
        self._sums.send(bucket_index, self._find_divisor())
        self._sent(bucket_index)

    def arrivals(self) -> Iterator[int]:
        """Nothing to do besides."""
        return self._sums.arrivals()

    def _find_divisor(self) -> Tensor | None:
        if not self._agreed:
            self._divisor, self._agreed = self._agree(), True
        return self._divisor


class NativeSums:
    """The backend's own way to sum each bucket.

    Args:
        buckets: of the model.
        in_threads: whether the group has a thread carry out what is not waited for. What comes last is summed when it is waited for then: nothing
            is left that could hide it, and a thread takes a tenth of a millisecond to wake.

    Attributes:
        pulls: whether copy engines move the bytes.
    """

    def __init__(self, buckets: Sequence[GradientBucket], *, in_threads: bool = False):
        self._buckets = buckets
        self.in_threads = in_threads
        self._works: list[tuple[int, Work | None]] = []
        self.pulls = self._asked_to_pull = False
        self._pulling: Pulling | None = None
        self._divisor: Divisor | None = None
        # On a GPU one kernel copies many gradients, and the caching allocator gives their memory back as fast.
        self.takes_early = all(bucket.buffer.device.type == "cpu" for bucket in buckets)

    @property
    def shared_bytes(self) -> int:
        """What the buckets take of memory that all ranks map."""
        return 0 if self._pulling is None else self._pulling.size_bytes

    def pull_where_shared(self, here: Session) -> None:
        """Calls `pull`, until the session ends, if the buckets are large and the GPUs of all ranks share memory; again does nothing. Collective."""
        buffers = [bucket.buffer for bucket in self._buckets]
        large = sum(buffer.nbytes for buffer in buffers) >= _LEAST_PULLED_BYTES * len(buffers)
        if self._asked_to_pull or here.world_size == 1 or not large or not all(map(can_be_pulled, buffers)):
            return
        self._asked_to_pull = True  # once: graphs that have been captured since go on with the buckets where they are
        pulling = here.groups.pulling(here.device, [buffer.numel() for buffer in buffers], [buffer.dtype for buffer in buffers])
        if pulling is not None:
            self.pull(pulling)
            here.release.callback(_stop_pulling, weakref.ref(self))

    def pull(self, pulling: Pulling) -> None:
        """From now on the buckets lie in memory that all ranks map, and copy engines move their bytes."""
        self._pulling, self.pulls = pulling, True
        for bucket, buffer in zip(self._buckets, pulling.tensors, strict=True):
            bucket.lie_in(buffer)

    def stop_pulling(self) -> None:
        """From now on the backend sums the buckets, which stay where they are, as does what graphs work with."""
        self.pulls = False

    def divide_by(self, divisor: Divisor) -> None:
        """The sums of the step that has begun are divided on their way, if copy engines move them."""
        self._divisor = divisor

    def begin(self) -> None:
        """Forgets what an interrupted step has sent."""
        self._works, self._divisor = [], None
        for bucket in self._buckets:
            bucket.begin()

    def take(self, bucket_index: int, member: int, divisor: Tensor) -> None:
        """Packs one gradient."""
        self._buckets[bucket_index].take(member, divisor)

    def send(self, bucket_index: int, divisor: Tensor | None) -> None:
        """Packs what is left of a bucket and begins its sum."""
        bucket = self._buckets[bucket_index]
        bucket.pack(divisor)
        if self.in_threads and len(self._works) + 1 == len(self._buckets):
            self._works.append((bucket_index, None))
        else:
            self._works.append((bucket_index, self._begin(bucket_index)))
            events.observer().on_mark(events.Mark.BUCKET_SENT, bucket.facts)

    def _begin(self, bucket_index: int) -> Work:
        bucket = self._buckets[bucket_index]
        if self._pulling is None or not self.pulls:
            return bucket.begin_sum()
        bucket.is_divided |= self._divisor is not None
        return pull_sum(self._pulling, bucket_index, self._divisor)

    def arrivals(self) -> Iterator[int]:
        """Waits for one after the other."""
        works, self._works = self._works, []
        for bucket_index, work in works:
            bucket = self._buckets[bucket_index]
            if work is None:
                events.observer().on_mark(events.Mark.BUCKET_SENT, bucket.facts)
                work = bucket.begin_sum(waits=True)
            work.wait()
            events.observer().on_mark(events.Mark.BUCKET_SUMMED, bucket.facts)
            yield bucket_index


def _stop_pulling(sums: "weakref.ref[NativeSums]") -> None:
    if (there := sums()) is not None:
        there.stop_pulling()
