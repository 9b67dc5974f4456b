"""What the ranks of `hora bench allreduce` do."""

import pytest
import torch
from typing_extensions import override

import hora
from hora.comm.algorithms import find_algorithm
from hora.comm.algorithms.native import Native
from hora.diag.wire.measure import LIMIT, Point, WrongSum, measure
from hora.diag.wire.request import Request
from hora.diag.wire.work import bytes_moved, calls_in_a_sample
from hora.testing import run_ranks

REQUEST = Request(sizes=(4, 65540), backends=("shm", "gloo"), algorithms=("native", "ring", "auto"), ranks=(2, 3), rounds=2)


class Spoilt(Native):
    """Adds one to the last element of the last tensor of the first sample that counts, on rank 1."""

    num_calls = 0

    @override
    def all_reduce(self, tensor, op, groups, *, async_op):
        super().all_reduce(tensor, op, groups, async_op=async_op)
        self.num_calls += 1
        if self.num_calls == 2 * calls_in_a_sample(tensor.nbytes, "cpu") and groups.world.rank() == 1:
            tensor[-1] += 1
        return ()


@run_ranks(3)
def test_every_variant_of_every_point_is_measured_on_the_ranks_that_have_part():
    points: list[Point] = []
    measure(REQUEST, hora.session(), points.append)
    counts = (2, 3) if hora.rank() < 2 else (3,)
    assert [(point.size, point.ranks) for point in points] == [(size, ranks) for size in REQUEST.sizes for ranks in counts]
    for point in points:
        assert list(point.samples) == [LIMIT, *(f"{backend}/{name}" for backend in REQUEST.backends for name in REQUEST.algorithms)]
        assert all(len(samples) == 2 and min(samples) > 0 for samples in point.samples.values())
    for told in hora.all_gather(torch.tensor([points[-1].samples[LIMIT]], dtype=torch.float64)):
        assert told.tolist() == [points[-1].samples[LIMIT]], "the slowest rank's time is the sample of all"


@run_ranks(4, nodes=(0, 1, 0, 1))
def test_by_node_all_ranks_together_are_measured():
    points: list[Point] = []
    request = Request(sizes=(1024,), backends=("gloo",), algorithms=("native", "hierarchical"), ranks=(2, 4), rounds=1)
    measure(request, hora.session(), points.append)
    assert [(point.nodes, point.interleaved) for point in points[-1:]] == [(2, True)]
    assert list(points[-1].samples) == [LIMIT, "gloo/native", "gloo/hierarchical"]
    assert all(list(point.samples) == [LIMIT, "gloo/native"] for point in points[:-1])


@run_ranks(2)
@pytest.mark.parametrize("size", [1024, 4 << 20])
def test_a_wrong_sum_is_named_on_all_ranks(size):
    spoilt = Spoilt()
    request = Request(sizes=(size,), backends=("shm",), algorithms=("native", "ring"), ranks=(2,), rounds=2)
    last = size // 4 * calls_in_a_sample(size, "cpu") - 1
    value = 3 * (last % 1021 + 1)
    where = f"element {size // 4 - 1} of call {calls_in_a_sample(size, 'cpu') - 1} is {value + 1} on rank 1, but the sum is {value}"
    with pytest.raises(WrongSum, match=f"with shm/ring: {where}"):
        measure(request, hora.session(), lambda point: None, lambda name: spoilt if name == "ring" else find_algorithm(name))


def test_what_an_all_reduce_must_move():
    assert [bytes_moved(1200, ranks) for ranks in (2, 3, 4)] == [1200, 1600, 1800]


def test_small_tensors_are_reduced_several_times_in_a_sample():
    assert [calls_in_a_sample(size, "cpu") for size in (4, 1 << 20, 4 << 20, 1 << 30)] == [20, 4, 1, 1]
    assert [calls_in_a_sample(size, "cuda") for size in (4, 64 << 20, 1 << 30)] == [20, 16, 1]
