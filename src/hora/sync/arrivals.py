"""The buckets of a window that is captured, in the order in which they are summed, each once it holds its sums.

A sum of NCCL's and the update of the bucket before it become ready at the same moment, when the sum before them ends. If the update is first it takes
all of the GPU, and the links are idle until it is done (seen: 160 us with 100 MiB on H200s). So what works on a bucket comes a little later.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hora.sync.gradients import GradientBucket, divide_all

_NUM_DELAYS = 2
"""Kernels that do nothing, of 2 us each, in which the next sum finds its place."""


class Arrivals:
    """To be gone through once, by `undivided` or by `divided`. Collective: all ranks go to the end.

    Args:
        buckets: of the model.
        indices: of `buckets`, each when the current stream has waited for the sums.
        divisor: what the sums are to be divided by, a scalar on their device.
    """

    def __init__(self, buckets: Sequence[GradientBucket], indices: Iterator[int], divisor: Tensor) -> None:
        self.divisor = divisor
        self._buckets = buckets
        self._indices = indices
        self._made = torch.cuda.current_stream().record_event() if divisor.is_cuda else None

    @property
    def are_divided(self) -> bool:
        """Whether the sums are divided on their way."""
        return all(bucket.is_divided for bucket in self._buckets)

    def undivided(self) -> Iterator[GradientBucket]:
        """Each bucket with its sums, divided on their way or not at all."""
        for place, index in enumerate(self._indices):
            self._give_way(place)
            yield self._buckets[index]

    def divided(self) -> Iterator[GradientBucket]:
        """Each bucket with its sums divided, on a GPU beside what the current stream does before it comes to that bucket."""
        if self.are_divided:
            yield from self.undivided()
            return
        if self._made is None:
            for bucket in self.undivided():
                divide_all([bucket], self.divisor)
                yield bucket
            return
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_event(self._made)
        divided: list[tuple[GradientBucket, torch.cuda.Event]] = []
        with torch.cuda.stream(stream):
            for bucket in self.undivided():
                divide_all([bucket], self.divisor)
                divided.append((bucket, stream.record_event()))
        for bucket, event in divided:
            current.wait_event(event)
            yield bucket
        current.wait_stream(stream)

    def _give_way(self, place: int) -> None:
        """The current stream lets the next sum begin, if one comes after that of the bucket of number `place`."""
        if self._made is not None and place + 1 < len(self._buckets):
            for _ in range(_NUM_DELAYS):
                torch.zeros((), device=self.divisor.device)
