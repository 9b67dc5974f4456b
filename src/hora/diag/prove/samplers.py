"""Sees how a script's DistributedSamplers are used: without `set_epoch` each epoch has the same order."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data.distributed import DistributedSampler


class Samplers:
    """Which samplers were there, and in which epochs they were gone through.

    Attributes:
        repeated: an epoch that a shuffling sampler was gone through twice in; None if there is none.
    """

    def __init__(self) -> None:
        self.repeated: int | None = None
        self._epochs: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()

    def install(self) -> None:
        """Wraps the iteration."""
        original = DistributedSampler.__iter__

        def iterate(sampler: DistributedSampler[Any]) -> Iterator[Any]:
            seen = self._epochs.setdefault(sampler, set())
            if sampler.shuffle and sampler.epoch in seen:
                self.repeated = sampler.epoch
            seen.add(sampler.epoch)
            return original(sampler)

        DistributedSampler.__iter__ = iterate  # type: ignore[method-assign]
