"""Chunks: whose bytes are in which, and that they arrive where they belong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hora.comm.parcel import Parcel, Part, flat_bytes, plan_chunks, stream

CPU = torch.device("cpu")
sizes = st.lists(st.integers(0, 40), max_size=8)


@given(sizes, st.integers(1, 50))
def test_chunks_cover_every_byte_once_and_in_order(sizes, chunk_bytes):
    plan = list(plan_chunks(sizes, chunk_bytes))
    found = [(part.buffer, byte) for parts in plan for part in parts for byte in range(part.begin, part.end)]
    assert found == [(buffer, byte) for buffer, size in enumerate(sizes) for byte in range(size)]
    lengths = [sum(part.end - part.begin for part in parts) for parts in plan]
    assert all(length == chunk_bytes for length in lengths[:-1])
    assert all(0 < length <= chunk_bytes for length in lengths)


@given(sizes, st.integers(1, 50))
def test_whoever_knows_only_the_sum_cuts_alike(sizes, chunk_bytes):
    def lengths(plan):
        return [sum(part.end - part.begin for part in parts) for parts in plan]

    assert lengths(plan_chunks(sizes, chunk_bytes)) == lengths(plan_chunks([sum(sizes)], chunk_bytes))


def test_a_large_tensor_between_small_ones():
    assert list(plan_chunks([1, 5, 1], 3)) == [[Part(0, 0, 1), Part(1, 0, 2)], [Part(1, 2, 5)], [Part(2, 0, 1)]]


TENSORS = [
    torch.arange(10.0),
    torch.tensor(3, dtype=torch.int16),
    torch.empty(0, 2),
    torch.arange(12).view(3, 4).t(),
    torch.tensor([1j]).conj(),
]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000])
def test_streams_carry_all_values(chunk_bytes):
    sent: list[torch.Tensor] = []
    target = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in TENSORS]
    plan = [tensor.nbytes for tensor in TENSORS]
    stream(plan_chunks(plan, chunk_bytes), TENSORS, None, lambda chunk: sent.append(chunk.clone()), CPU)
    arriving = iter(sent)
    stream(plan_chunks(plan, chunk_bytes), None, target, lambda chunk: chunk.copy_(next(arriving)), CPU)
    assert all(torch.equal(a, b) for a, b in zip(target, TENSORS, strict=True))
    copies = [torch.empty_like(tensor) for tensor in target]
    stream(plan_chunks(plan, chunk_bytes), TENSORS, copies, lambda chunk: None, CPU)
    assert all(torch.equal(a, b) for a, b in zip(copies, TENSORS, strict=True))


def test_chunks_within_one_tensor_are_views_of_it():
    tensor, seen = torch.zeros(100, dtype=torch.uint8), []
    stream(plan_chunks([100], 40), [tensor], None, seen.append, CPU)
    assert [chunk.data_ptr() - tensor.data_ptr() for chunk in seen] == [0, 40, 80]


def test_packing_copies_nothing():
    tensor = torch.zeros(1000)
    parcel = Parcel.pack({"a": tensor, "b": b"x" * 100_000}, 10**6)
    assert flat_bytes(parcel.tensors[0]).data_ptr() == tensor.data_ptr()
    assert parcel.sizes.payload == 104_000
