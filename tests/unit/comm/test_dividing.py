import math

import pytest
import torch

from hora import env
from hora.comm import dividing
from hora.comm.backends.shm.build import load_kernel
from hora.comm.dividing import divide_and_look

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="needs a C compiler")


@pytest.mark.parametrize("numel", [0, 1, 7, 64, 1000, 100_003])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 257.0, 1e-30, 16_777_217.0, 0.1])
def test_has_the_bits_of_torch(numel, divisor):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 100
    out = torch.full_like(values, 5.0)
    largest = divide_and_look(values, divisor, out)
    assert torch.equal(out, torch.div(values, torch.tensor(divisor, dtype=torch.float64)))
    assert largest == (float(values.abs().max()) if numel else 0.0)


def test_other_layouts_that_lie_alike_are_taken():
    values = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(values)
    assert divide_and_look(values, 2.0, out) == float(values.abs().max())
    assert torch.equal(out, values / 2)
    assert divide_and_look(torch.tensor(-3.0), 2.0, scalar := torch.tensor(0.0)) == 3.0
    assert scalar == -1.5


def test_a_view_with_the_other_sign_is_left_to_torch():
    values = torch._neg_view(torch.tensor([1.0, 2.0]))
    assert divide_and_look(values, 2.0, out := torch.zeros(2)) is None
    assert out.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("place", [0, 5, 70])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_the_largest_tells_what_is_not_finite(place, value):
    values = torch.ones(71)
    values[place] = value
    largest = divide_and_look(values, 1.0, torch.empty_like(values))
    assert math.isfinite(largest) == math.isfinite(value)
    assert largest >= 3e38 or math.isnan(largest)


@pytest.mark.parametrize(
    ("values", "out"),
    [
        (torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)),
        (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)),
        (torch.ones(4, 3).t(), torch.ones(3, 4)),
        (torch.ones(1).expand(4), torch.ones(4)),
        (torch.ones(8)[::2], torch.ones(4)),
    ],
)
def test_what_it_does_not_know_is_left_to_torch(values, out):
    assert divide_and_look(values, 2.0, out) is None
    assert bool((out == 1).all())


def test_in_place_is_left_to_torch():
    values = torch.ones(64)
    assert divide_and_look(values, 2.0, values) is None
    assert bool((values == 1).all())


def test_without_the_kernel_all_is_left_to_torch(monkeypatch):
    monkeypatch.setenv(env.SHM_KERNEL, "0")
    load_kernel.cache_clear()
    dividing._divide.cache_clear()
    try:
        assert divide_and_look(torch.ones(3), 2.0, torch.ones(3)) is None
    finally:
        monkeypatch.undo()
        load_kernel.cache_clear()
        dividing._divide.cache_clear()
