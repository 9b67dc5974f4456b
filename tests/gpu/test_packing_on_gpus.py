"""Gradients that one kernel copies and looks at: the numbers and norms of torch, which does one after the other."""

from unittest import mock

import pytest
import torch
from torch import nn

import hora
from hora.comm.packing import make_packing
from hora.comm.packing import packing as module
from hora.sync.finite import norms
from hora.sync.gradients import GradientBucket
from hora.testing import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = [(4096,), (3,), (5,), (2, 4096, 3), (0,), (16, 8, 3, 3), (1,), (7,), (70_000,), *[(8,)] * 70]
SPOILT = [(0, 4095, torch.nan), (3, 7, -torch.inf), (40, 2, torch.nan)]


def bucket_of(dtype: torch.dtype) -> GradientBucket:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype, device="cuda")) for shape in SHAPES]
    parameters[5].data = parameters[5].data.to(memory_format=torch.channels_last)
    return GradientBucket(parameters)


def give_gradients(bucket: GradientBucket, spoilt, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for number, parameter in enumerate(bucket.parameters):
        gradient = torch.randn(parameter.shape, device="cuda").to(parameter.dtype)
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
        for index, element, value in spoilt:
            if index == number:
                parameter.grad.view(-1)[element] = value
    bucket.parameters[8].grad = None
    bucket.parameters[20].grad = torch.ones(13, dtype=parameter.dtype, device="cuda")[5:]  # begins at no multiple of 16 bytes


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("spoilt", [[], SPOILT], ids=["finite", "not finite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_one_kernel_copies_and_finds_what_torch_does(dtype, spoilt):
    fused, plain = bucket_of(dtype), bucket_of(dtype)
    with fused.marking():
        for bucket in (fused, plain):
            give_gradients(bucket, spoilt)
            bucket.buffer.fill_(7)
            bucket.pack()
        assert torch.equal(fused.buffer.isnan(), plain.buffer.isnan())
        assert torch.equal(bits(fused.buffer.nan_to_num(9)), bits(plain.buffer.nan_to_num(9))), (
            "of what is no number torch keeps no bits in half precision"
        )
        assert plain.own_marks == {}
        if dtype is torch.float64:
            assert (fused.largest, fused.own_marks) == (None, {})
            return
        expected = norms({number: p.grad for number, p in enumerate(plain.parameters) if p.grad is not None})
        assert len(fused.own_marks) == len(fused.largest) > 10
        for number, mark in fused.own_marks.items():
            torch.testing.assert_close(mark, expected.get(number, torch.zeros((), device="cuda")).float(), rtol=0, atol=0, equal_nan=True)
        assert {0, 1, 3, 5, 6, 8, 20, 40} <= set(fused.own_marks)
        assert not {2, 4, 7} & set(fused.own_marks), "they begin at no multiple of 16 bytes, or are empty"


def test_a_graph_copies_and_looks_again():
    bucket = bucket_of(torch.float32)
    with bucket.marking():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            give_gradients(bucket, [])
            bucket.pack()
            graph = torch.cuda.CUDAGraph()
            sources = [None if p.grad is None else p.grad for p in bucket.parameters]
            with torch.cuda.graph(graph, stream=stream):
                bucket.pack()
        for value in (3.0, torch.inf, -2.0):
            sources[3].fill_(value)
            bucket.buffer.zero_()
            graph.replay()
            assert bool((bucket.views[3] == value).all())
            assert float(bucket.own_marks[3]) == abs(value), "the magnitudes of an earlier replay are gone"


def test_nothing_is_made_while_a_graph_is_captured():
    flat = torch.zeros(64, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert make_packing(flat, [flat]) is None
        flat.add_(1)


@run_ranks(1, backend="nccl")
def test_a_captured_step_packs_by_the_kernel():
    model = nn.Linear(4, 4).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, fused=True), model)
    train_step = hora.TrainStep(model, lambda model, batch, state: (model(batch).sum(), len(batch), {}, state), optimizer)
    with mock.patch.object(module, "_launch", side_effect=module._launch) as launched:
        for _ in range(6):
            train_step([torch.ones(2, 4, device=hora.device())])
        (bucket,) = optimizer.synchronizer._buckets
        flats = [call.args[0].data_ptr() for call in launched.call_args_list]
    assert train_step.num_replayed > 0
    assert flats.count(bucket.buffer.data_ptr()) == 1, "once, when the step was captured"


def test_a_kernel_that_cannot_be_had_or_does_not_copy_leaves_it_to_torch():
    flat = torch.zeros(64, device="cuda")
    assert make_packing(flat, [flat]) is not None
    for broken in (mock.Mock(side_effect=OSError("no compiler")), mock.Mock()):
        module._works.cache_clear()
        with mock.patch.object(module, "_launch", broken):
            assert make_packing(flat, [flat]) is None
        broken.assert_called_once()
    module._works.cache_clear()
    assert make_packing(flat, [flat]) is not None
