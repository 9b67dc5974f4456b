"""Small gradients on a CPU are divided and looked at together: what is put, and found, is that of one after the other."""

import math
from unittest import mock

import pytest
import torch
from torch import nn

from hora.errors import ConfigError
from hora.sync import gradients
from hora.sync.gradients import GradientBucket

SHAPES = [(3,), (70, 70), (), (2, 3, 4, 5), (0,), (4096,), (64, 2), (5,), (), (17, 11, 10)]


def bucket_of(dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES) -> GradientBucket:
    bucket = GradientBucket([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])
    bucket.buffer.fill_(7)
    bucket.begin()
    return bucket


def packed(
    dtype: torch.dtype,
    weight: float,
    *,
    small_bytes: int,
    keeps_marks: bool = True,
    spoilt: dict[int, float] | None = None,
    early: bool = True,
) -> GradientBucket:
    """A bucket whose gradients were taken as they came, or packed at the end; each by itself where `small_bytes` is negative."""
    torch.manual_seed(0)
    bucket, divisor = bucket_of(dtype), torch.tensor(weight, dtype=torch.float64)
    bucket.keeps_marks = keeps_marks
    for member, parameter in enumerate(bucket.parameters):
        parameter.grad = torch.randn(parameter.shape, dtype=dtype)
        if spoilt and member in spoilt:
            parameter.grad.view(-1)[-1] = spoilt[member]
    bucket.parameters[6].grad = bucket.parameters[6].grad.t().contiguous().t()  # lies otherwise in memory
    bucket.parameters[7].grad = None
    with mock.patch.object(gradients, "_SMALL_BYTES", small_bytes), torch.no_grad():
        for member in range(len(SHAPES)) if early else ():
            bucket.take(member, divisor)
        bucket.pack(divisor)
    return bucket


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("keeps_marks", [False, True])
@pytest.mark.parametrize("weight", [257.0, 3.0, 1e-25])
@pytest.mark.parametrize("spoilt", [{}, {0: math.nan}, {1: math.inf}, {2: -math.inf, 6: 3e38}, {0: 1e17}, {3: 3e38}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_as_one_after_the_other(dtype, spoilt, weight, keeps_marks, early):
    ours, oracle = (
        packed(dtype, weight, small_bytes=small_bytes, keeps_marks=keeps_marks, spoilt=spoilt, early=early)
        for small_bytes in (gradients._SMALL_BYTES, -1)
    )
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
        packed(torch.float32, 257.0, small_bytes=gradients._SMALL_BYTES)
    assert divide.call_count == 2, "the small ones, and the large one"


@pytest.mark.parametrize("name", ["flatten_many", "unflatten_many"])
def test_a_torch_that_cannot_put_them_together_has_them_one_by_one(monkeypatch, name):
    oracle = packed(torch.float32, 257.0, small_bytes=-1)
    monkeypatch.setattr(gradients, name, None)
    ours = packed(torch.float32, 257.0, small_bytes=gradients._SMALL_BYTES)
    assert torch.equal(ours.buffer, oracle.buffer)
    assert finite(ours) == finite(oracle)


def test_their_memory_is_given_back_while_others_come(monkeypatch):
    monkeypatch.setattr(gradients, "_TOGETHER_BYTES", 64)
    bucket = bucket_of(shapes=[(8,)] * 5)
    left = []
    with torch.no_grad():
        for member, parameter in enumerate(bucket.parameters):
            parameter.grad = torch.ones(8)
            bucket.take(member, torch.tensor(2.0))
            left.append(sum(each.grad is not None for each in bucket.parameters))
        bucket.parameters[0].grad = torch.ones(8)  # comes once more, when the one before has gone
        bucket.take(0, torch.tensor(2.0))
        bucket.pack(torch.tensor(2.0))
    assert left == [1, 0, 1, 0, 1]
    assert bucket.buffer.tolist() == [1.0] * 8 + [0.5] * 32 + [1.0] * 5


def test_one_that_a_hook_drops_while_it_waits_is_missing():
    bucket = bucket_of(shapes=[(8,), (8,)])
    with torch.no_grad():
        for member, parameter in enumerate(bucket.parameters):
            parameter.grad = torch.ones(8)
            bucket.take(member, torch.tensor(2.0))
        bucket.parameters[1].grad = None
        bucket.pack(torch.tensor(2.0))
    assert bucket.buffer.tolist() == [0.5] * 8 + [0.0] * 8 + [1.0, 0.0]
    assert bucket.absent() == {1}


def test_a_sparse_one_is_refused():
    bucket = bucket_of(shapes=[(8,), (8,)])
    bucket.parameters[0].grad = torch.ones(8)
    bucket.parameters[1].grad = torch.ones(8).to_sparse()
    with pytest.raises(ConfigError, match="a sparse one came"):
        bucket.pack(torch.tensor(2.0))
