"""The random numbers of data sets: where they come from, and how they are kept apart from the model's.

Data sets and collate functions draw from the global generators of torch, `random` and NumPy. While they run, those are lent to them with
seeds that say what for; afterwards the generators are as they were, so the number of workers changes neither the data nor the model's dropout.
Generators that a data set keeps for itself are out of reach.
"""

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_NUMPY_STATE_BYTES = 625 * 4  # of a Mersenne Twister: 624 words and the place among them


def seed_generators(seed: int) -> None:
    """Seeds the global generators of torch (CPU), `random` and NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    mtrand.seed(seed & 0xFFFF_FFFF)


class RandomNumbers:
    """Random numbers that take the place of those of the three global generators for a while at a time."""

    def __init__(self) -> None:
        self._numpy = np.random.MT19937(0)
        self._reached: tuple[torch.Tensor, tuple[Any, ...]] | None = None

    @contextmanager
    def in_force(self, seed: int | None = None) -> Iterator[None]:
        """Inside the `with` block the global generators begin at `seed`, or go on where these numbers were left; after it they are as before."""
        outer = torch.default_generator.get_state(), random.getstate(), mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._numpy)
        try:
            if self._reached is not None and seed is None:
                torch.default_generator.set_state(self._reached[0])
                random.setstate(self._reached[1])
            else:
                seed_generators(seed or 0)
            yield
        finally:
            self._reached = torch.default_generator.get_state(), random.getstate()
            torch.default_generator.set_state(outer[0])
            random.setstate(outer[1])
            mtrand.set_bit_generator(outer[2])

    def states(self) -> tuple[Any, ...]:
        """Where the generators stand while these numbers are in force, to be compared."""
        # The state in memory: asking NumPy for it takes longer than loading many a sample.
        numpy_state = ctypes.string_at(self._numpy.ctypes.state_address, _NUMPY_STATE_BYTES)
        return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), numpy_state
