"""Sees how a script's DistributedSamplers are used: without `set_epoch` each epoch has the same order."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data.distributed import DistributedSampler


class Samplers:
    """Which samplers were there, and in which epochs they were gone through to train.

    Attributes:
        repeated: an epoch that a shuffling sampler was gone through twice in; None if there is none.
    """

    def __init__(self) -> None:
        self.repeated: int | None = None
        self._epochs: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
        self._begun: list[Any] = []

    def install(self) -> None:
        """Wraps the iteration."""
        original = DistributedSampler.__iter__

        def iterate(sampler: DistributedSampler[Any]) -> Iterator[Any]:
            if sampler.shuffle:
                self._begun.append(sampler)
            return original(sampler)

        DistributedSampler.__iter__ = iterate  # type: ignore[method-assign]

    def settle(self, *, trains: bool) -> None:
        """A model was called, to train or not: that is what the samplers begun before it are for. The order of an evaluation matters to nobody.

        One that was begun several times since the last call was looked into, and then gone through once.
        """
        for sampler in dict.fromkeys(self._begun) if trains else ():
            seen = self._epochs.setdefault(sampler, set())
            if sampler.epoch in seen:
                self.repeated = sampler.epoch
            seen.add(sampler.epoch)
        self._begun.clear()
