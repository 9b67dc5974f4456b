"""The random numbers of data sets: where they come from, and how they are kept apart from the model's.

Data sets and collate functions draw from the global generators of torch, `random` and NumPy. While they run, those are lent to them with
seeds that say what for; afterwards the generators are as they were, so the number of workers changes neither the data nor the model's dropout.
Generators that a data set keeps for itself are out of reach.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand


def seed_generators(seed: int) -> None:
    """Seeds the global generators of torch (CPU), `random` and NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    mtrand.seed(seed & 0xFFFF_FFFF)


class RandomStream:
    """Random numbers that begin at `seed` and, for a while at a time, take the place of those of the global generators."""

    def __init__(self, seed: int):
        self._seed = seed
        self._numpy = np.random.MT19937(0)
        self._reached: tuple[torch.Tensor, tuple[Any, ...]] | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside the `with` block the global generators go on where this stream was left; after it, where they themselves were."""
        outer = torch.default_generator.get_state(), random.getstate(), mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._numpy)
        try:
            if self._reached is None:
                seed_generators(self._seed)
            else:
                torch.default_generator.set_state(self._reached[0])
                random.setstate(self._reached[1])
            yield
        finally:
            self._reached = torch.default_generator.get_state(), random.getstate()
            torch.default_generator.set_state(outer[0])
            random.setstate(outer[1])
            mtrand.set_bit_generator(outer[2])
