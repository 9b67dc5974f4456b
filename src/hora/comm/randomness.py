"""The global generators of torch (CPU), `random` and NumPy, lent for a while with seeds that say what for; afterwards they are as they were.

Data sets and collate functions draw from them, so that the number of workers changes neither the data nor the model's dropout; in exact mode so
does each micro-step. Generators that somebody keeps for himself are out of reach.
"""

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.random import mtrand

_NUMPY_STATE_BYTES = 625 * 4  # of a Mersenne Twister: 624 words and the place among them


def seed_generators(seed: int) -> None:
    """Seeds the global generators of torch (CPU), `random` and NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    mtrand.seed(seed & 0xFFFF_FFFF)


def seed_torch(seed: int) -> None:
    """Seeds torch's global generators of the CPU and of the current GPU.

    `torch.manual_seed` gives these the same numbers, and leaves word for each kind of device that has not been used: a twentieth of a millisecond
    or more, which is much in a step that a CUDA graph carries out.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def fingerprint() -> tuple[Any, ...]:
    """Changes when one of the global generators is drawn from."""
    # NumPy's state as it lies in memory: asking for it takes longer than loading many a sample.
    numpy_state = ctypes.string_at(mtrand.get_bit_generator().ctypes.state_address, _NUMPY_STATE_BYTES)
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), numpy_state


@contextmanager
def lent_generators() -> Iterator[None]:
    """After the `with` block the global generators go on where they were before it."""
    states = _states()
    try:
        yield
    finally:
        _put_back(states)


class RandomNumbers:
    """Random numbers that begin at `seed` and take the place of those of the global generators for a while at a time."""

    def __init__(self, seed: int):
        self._seed = seed
        self._reached: tuple[Any, ...] | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside the `with` block the global generators go on where these numbers were left."""
        with lent_generators():
            if self._reached is None:
                seed_generators(self._seed)
            else:
                _put_back(self._reached)
            try:
                yield
            finally:
                self._reached = _states()


def _states() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), random.getstate(), mtrand.get_state()


def _put_back(states: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    mtrand.set_state(states[2])
