import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hora.comm.codec import decode, encode
from hora.errors import CheckpointMismatch
from hora.train.generators import capture_generators, restore_generators

CPU = torch.device("cpu")


def _draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


@contextmanager
def _generators_put_back():
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


@pytest.mark.parametrize("draws_before", [0, 1, 2])
def test_restored_generators_draw_the_same_numbers(draws_before):
    with _generators_put_back():
        for _ in range(draws_before):
            _draw()
        tree = capture_generators(CPU)
        expected = [_draw() for _ in range(3)]
        restore_generators(decode(*encode(tree)), CPU)
        assert [_draw() for _ in range(3)] == expected


def test_capturing_draws_nothing():
    with _generators_put_back():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        expected = _draw()
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        capture_generators(CPU)
        assert _draw() == expected


@pytest.mark.parametrize("damage", [{"torch": torch.zeros(3, dtype=torch.uint8)}, {"python": {"version": 1, "state": [], "gauss": None}}])
def test_the_state_of_another_version_is_told(damage):
    with _generators_put_back(), pytest.raises(CheckpointMismatch, match="does not fit this version"):
        restore_generators({**capture_generators(CPU), **damage}, CPU)
