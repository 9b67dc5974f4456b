"""What ranks tell each other of a sample, to find out whether it is the same one."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hora.data.agreement import require_same_stream
from hora.data.opening import NOTHING, Opening
from hora.data.role import Role
from hora.plan.logical import LogicalRanks


@pytest.fixture
def _bfloat16_is_the_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_bfloat16_is_the_default")
@pytest.mark.parametrize("count", [0, 1, 2, 64, 65, 300, 150528])
def test_numbers_of_a_sample_are_found_whatever_type_is_the_default(count: int) -> None:
    found = Opening.of(torch.arange(count, dtype=torch.float64))
    assert found is not None
    (numbers,) = found.numbers
    assert len(numbers) == min(count, 64)
    assert numbers[:1] + numbers[1:][-1:] == [0.0, count - 1][:count]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("count", [2**24 + 4, 2**27])  # no float32 says their last places
def test_numbers_of_a_large_sample_are_found(count: int) -> None:
    found = Opening.of(torch.zeros(1).expand(count))
    assert found is not None
    assert [len(numbers) for numbers in found.numbers] == [64]


@pytest.mark.parametrize(
    "make",
    [
        lambda off: {"x": torch.ones(3) * off},
        lambda off: (np.ones(3, np.float32) * np.float32(off), 1),
        lambda off: [np.zeros(2) + off, np.array(off), np.arange(2)],
        lambda off: np.float32(off),
        lambda off: ("text", off, [off, None]),
        lambda off: complex(off, 1.0),
    ],
)
def test_what_processors_compute_a_little_differently_is_one_sample(make: Any) -> None:
    one, near, other = (Opening.of(make(off)) for off in (1.0, 1.00001, 1.5))
    assert one is not None
    assert near is not None
    assert other is not None
    assert one.is_like(near)
    assert not one.is_like(other)


def test_the_order_of_a_dict_makes_no_other_sample() -> None:
    """That of one made of a set is another one in each process."""
    one = Opening.of({"a": torch.ones(2), "b": np.zeros(2), "c": torch.arange(2), "d": torch.arange(3)})
    same = Opening.of({"d": torch.arange(3), "c": torch.arange(2), "b": np.zeros(2), "a": torch.ones(2)})
    other = Opening.of({"d": torch.arange(3), "c": torch.arange(2), "b": np.ones(2), "a": torch.ones(2)})
    assert one is not None
    assert same is not None
    assert other is not None
    assert one.is_like(same)
    assert not one.is_like(other)


@pytest.mark.parametrize("sample", [[0.5] * 10_000, [torch.ones(70)] * 1000])
def test_of_a_sample_with_many_parts_little_is_told(sample: Any) -> None:
    found = Opening.of(sample)
    assert found is not None
    assert len(found.numbers) == 64


def test_a_stream_is_read_after_the_job_too() -> None:
    require_same_stream(Role(0, LogicalRanks(2, 2), in_job=True), 0, NOTHING)
