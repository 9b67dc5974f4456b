"""Small gradients on a CPU are divided and looked at together: what is put, and found, is that of one after the other."""

import math
from unittest import mock

import pytest
import torch
from torch import nn

from hora.sync import gradients
from hora.sync.gradients import GradientBucket

SHAPES = [(3,), (70, 70), (), (2, 3, 4, 5), (0,), (4096,), (64, 2), (5,)]
WEIGHT = torch.tensor(257.0, dtype=torch.float64)


def packed(dtype: torch.dtype, *, together: bool, keeps_marks: bool, spoilt: dict[int, float], early: bool) -> GradientBucket:
    """A bucket whose gradients were taken one by one, as they came, or packed at the end."""
    torch.manual_seed(0)
    bucket = GradientBucket([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES])
    bucket.keeps_marks = keeps_marks
    bucket.buffer.fill_(7)
    bucket.begin()
    for member, parameter in enumerate(bucket.parameters):
        parameter.grad = torch.randn(parameter.shape, dtype=dtype)
        if member in spoilt:
            parameter.grad.view(-1)[-1] = spoilt[member]
    bucket.parameters[6].grad = bucket.parameters[6].grad.t().contiguous().t()  # lies otherwise in memory
    bucket.parameters[7].grad = None
    with mock.patch.object(gradients, "_SMALL_BYTES", gradients._SMALL_BYTES if together else -1), torch.no_grad():
        for member in range(len(SHAPES)) if early else ():
            bucket.take(member, WEIGHT)
        bucket.pack(WEIGHT)
    return bucket


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("keeps_marks", [False, True])
@pytest.mark.parametrize("spoilt", [{}, {0: math.nan}, {1: math.inf}, {2: -math.inf, 6: 3e38}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_as_one_after_the_other(dtype, spoilt, keeps_marks, early):
    ours, oracle = (packed(dtype, together=together, keeps_marks=keeps_marks, spoilt=spoilt, early=early) for together in (True, False))
    assert bits(ours.buffer) == bits(oracle.buffer)
    assert ours.is_surely_finite() == oracle.is_surely_finite()
    assert finite(ours) == finite(oracle)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist()


def finite(bucket: GradientBucket) -> dict[int, bool]:
    return {member: bool(mark.isfinite()) for member, mark in sorted(bucket.own_marks.items())}


def test_they_are_divided_at_once():
    with (
        mock.patch.object(gradients, "_divide", wraps=gradients._divide) as divide,
        mock.patch.object(gradients, "divide_and_look", return_value=None),
    ):
        packed(torch.float32, together=True, keeps_marks=True, spoilt={}, early=True)
    assert divide.call_count == 2, "the small ones, and the large one"


@pytest.mark.parametrize("name", ["flatten_many", "unflatten_many"])
def test_a_torch_that_cannot_put_them_together_has_them_one_by_one(monkeypatch, name):
    oracle = packed(torch.float32, together=False, keeps_marks=True, spoilt={}, early=True)
    monkeypatch.setattr(gradients, name, None)
    ours = packed(torch.float32, together=True, keeps_marks=True, spoilt={}, early=True)
    assert torch.equal(ours.buffer, oracle.buffer)
    assert finite(ours) == finite(oracle)
