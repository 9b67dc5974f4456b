"""Where the kernel that packs gradients copies them to, with the kernel's work done by torch; the kernel is tried on GPUs (`tests/gpu`)."""

import sys
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import hora.comm.packing
from hora.comm.packing import make_packing, packing
from hora.comm.packing.packing import Packing, chunks_of
from hora.sync import gradients
from hora.sync.gradients import GradientBucket

launch = packing._launch


def in_torch(flat, largest, chunks, sources):
    """What the kernel does."""
    for number, at, place, count in chunks.tolist():
        values = sources[number].as_strided((sources[number].numel(),), (1,))[at : at + count]
        flat[place : place + count] = values
        bits = values.float().abs().view(torch.int32).max()
        largest[number] = torch.maximum(largest[number], bits)


@pytest.fixture(autouse=True)
def kernel_in_torch(monkeypatch):
    monkeypatch.setattr(packing, "_launch", in_torch)


@pytest.mark.parametrize("numels", [[1], [4096], [4097, 3], [0, 9000, 0, 4096]], ids=str)
def test_each_element_is_in_one_chunk(numels):
    begins = [sum(numels[:number]) for number in range(len(numels))]
    chunks = chunks_of(list(zip(begins, numels, strict=True)))
    expected = [(number, at, begins[number] + at) for number, numel in enumerate(numels) for at in range(numel)]
    assert [(number, at + i, place + i) for number, at, place, count in chunks for i in range(count)] == expected
    assert all(at % 16 == 0 for _, at, _, _ in chunks), "the kernel reads 16 bytes at a time"


def test_gradients_come_to_their_places_and_what_is_there_already_is_looked_at_too():
    numels = [5000, 3, 1, 8, 0, *[4] * 70]
    flat = torch.zeros(sum(numels) + 2)
    flat[-2:] = 7
    places = list(flat[:-2].split(numels))
    here = Packing(flat, places)
    gradients = {number: torch.full((numel,), -float(number)) for number, numel in enumerate(numels)}
    gradients[0][4999] = torch.inf
    places[3].fill_(2)
    taken = {number: gradient for number, gradient in gradients.items() if number != 3 and here.takes(number, gradient)}
    largest = dict(zip(here.members, here.pack(taken).tolist(), strict=True))
    assert here.members == [0, 1, 3, *range(5, 75)], "that of 1 begins at no multiple of 16 bytes, one is empty"
    assert set(taken) == set(here.members) - {3}
    assert all(torch.equal(places[number], gradient) for number, gradient in taken.items())
    assert largest == {0: torch.inf, 1: 1.0, 3: 2.0, **{number: number for number in range(5, 75)}}
    assert (places[2].tolist(), flat[-2:].tolist()) == ([0.0], [7.0, 7.0])


def test_what_is_no_number_is_larger_than_all_others():
    flat = torch.zeros(8)
    gradient = torch.tensor([torch.inf, 1.0, -torch.nan, -torch.inf])
    assert Packing(flat, [flat[:4], flat[4:]]).pack({0: gradient}).isnan().tolist() == [True, False]


def test_gradients_that_lie_otherwise_are_left_to_others():
    flat = torch.zeros(16)
    here = Packing(flat, [flat.view(4, 4)])
    fits = torch.ones(4, 4)
    assert here.takes(0, fits)
    for other in (fits.t(), fits.double(), fits.view(16), torch.ones(17)[1:].view(4, 4)):
        assert not here.takes(0, other)


def test_strides_of_dimensions_of_one_element_do_not_matter():
    """Those of a convolution 1 x 1 whose inputs alone are channels_last."""
    flat = torch.zeros(16)
    places = [flat[:8].view(2, 4, 1, 1), flat[8:].view(2, 1, 2, 2)]
    here = Packing(flat, places)
    gradients = {
        0: torch.arange(8.0).as_strided((2, 4, 1, 1), (4, 1, 4, 4)),
        1: torch.arange(8.0, 16).as_strided((2, 1, 2, 2), (4, 1, 2, 1)),
    }
    assert all(here.takes(number, gradient) for number, gradient in gradients.items())
    assert here.pack(gradients).tolist() == [7, 15]
    assert all(torch.equal(places[number], gradient) for number, gradient in gradients.items())


@pytest.mark.parametrize("marks", [True, False])
def test_a_bucket_packs_the_same_with_the_kernel_and_without(monkeypatch, marks):
    monkeypatch.setattr(gradients, "make_packing", Packing)
    shapes = [(5, 4), (3,), (5,), (2, 2), (16,), (8, 4)]
    with_kernel, without = (GradientBucket([nn.Parameter(torch.zeros(shape)) for shape in shapes]) for _ in range(2))
    for bucket in (with_kernel, without):
        for number, parameter in enumerate(bucket.parameters):
            parameter.grad = 10.0 * number + torch.arange(float(parameter.numel())).view(parameter.shape)
        bucket.parameters[4].grad = None
        bucket.parameters[5].grad = bucket.parameters[5].grad.t().contiguous().t()  # lies otherwise in memory
        bucket.buffer.fill_(7)
    without.pack()
    with with_kernel.marking() if marks else nullcontext():
        with_kernel.pack()
        found = {number: float(mark) for number, mark in with_kernel.own_marks.items()}
    assert torch.equal(with_kernel.buffer, without.buffer)
    assert with_kernel.lanes.tolist() == [1, 1, 1, 1, 0, 1]
    assert found == ({0: 19, 1: 12, 3: 33, 4: 0, 5: 81} if marks else {})
    assert (with_kernel.own_marks, with_kernel.largest) == ({}, None)


def test_a_bucket_that_has_moved_packs_to_its_new_place(monkeypatch):
    monkeypatch.setattr(gradients, "make_packing", Packing)
    bucket = GradientBucket([nn.Parameter(torch.zeros(8))])
    before = bucket.buffer
    bucket.parameters[0].grad = torch.ones(8)
    for _ in range(2):
        with bucket.marking():
            bucket.pack()
        assert bucket.buffer.tolist() == [1.0] * 9, "the gradient, and that there is one"
        before.zero_()
        bucket.lie_in(torch.zeros_like(before))
    assert before.tolist() == [0.0] * 9


def test_a_cpu_has_no_such_kernel():
    flat = torch.zeros(16)
    assert make_packing(flat, [flat]) is None


def test_the_kernel_runs_on_the_device_of_the_bucket_whatever_the_current_one_is(monkeypatch):
    flat = torch.zeros(16)
    there = mock.MagicMock()  # `of(flat)` is the device for a while
    kernel = mock.Mock(side_effect=lambda *_, **__: there.of.return_value.__enter__.assert_called_once())
    monkeypatch.setattr(torch.cuda, "device_of", there.of)
    monkeypatch.setattr(hora.comm.packing, "kernel", SimpleNamespace(copy_and_look=defaultdict(lambda: kernel)), raising=False)
    monkeypatch.setattr(packing, "_launch", launch)
    Packing(flat, [flat]).pack({})
    kernel.assert_called_once()
    there.of.assert_called_once_with(flat)
    there.of.return_value.__exit__.assert_called_once()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_is_used_where_it_copies_what_is_there(monkeypatch, dtype):
    works = packing._works.__wrapped__
    assert works(torch.device("cpu"), dtype)
    monkeypatch.setattr(packing, "_launch", lambda flat, largest, chunks, sources: in_torch(flat, largest, chunks[:-1], sources))
    assert not works(torch.device("cpu"), dtype)
    monkeypatch.setattr(packing, "_launch", launch)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "hora.comm.packing.kernel", raising=False)
    monkeypatch.delattr(hora.comm.packing, "kernel", raising=False)
    assert not works(torch.device("cpu"), dtype)
