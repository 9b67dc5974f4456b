import math

import pytest
import torch

import hora
from hora.comm.parcel import Letter, Parcel
from hora.errors import ConfigError
from hora.testing import run_ranks

CPU = torch.device("cpu")


def tree(rank: int) -> dict:
    return {
        "rank": rank,
        "name": "é" * rank,
        "pair": (1.1, [None, True, b"\x00\xff"]),
        "numbers": {0: math.inf, -1: 2**70},
        "weights": [torch.arange(rank), torch.tensor(1.5, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bool)],
    }


def same(first, second) -> bool:
    tensors = (first.pop("weights"), second.pop("weights"))
    equal = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*tensors, strict=True))
    return equal and repr(first) == repr(second)


@run_ranks(1, 2, 3, 4)
def test_broadcast_object_gives_what_the_source_has(world_size):
    for src in range(world_size):
        found = hora.broadcast_object(tree(5) if hora.rank() == src else object(), src)
        assert same(found, tree(5))


@run_ranks(1, 2, 3, 4)
def test_all_gather_object_gives_all_by_rank(world_size):
    found = hora.all_gather_object(tree(hora.rank()))
    assert len(found) == world_size
    assert all(same(one, tree(rank)) for rank, one in enumerate(found))


@run_ranks(1, 2)
def test_small_objects_of_every_kind_pass():
    for obj in (None, "", [], {}, 0, False, b"", torch.empty(0)):
        assert repr(hora.all_gather_object(obj)) == repr([obj] * hora.world_size())


@run_ranks(2, 3)
def test_object_that_cannot_be_sent_is_an_error_on_every_rank():
    with pytest.raises(ConfigError, match=r"rank 1 cannot send an object: a must be None, bool, .* but is builtins\.range instead"):
        hora.broadcast_object({"a": range(1)} if hora.rank() == 1 else None, 1)
    with pytest.raises(ConfigError, match="rank 0 cannot send an object"):
        hora.all_gather_object(range(1) if hora.rank() == 0 else {})
    hora.barrier()


@run_ranks(2)
def test_object_that_is_too_large_is_an_error_on_every_rank():
    large = torch.zeros(300)
    with pytest.raises(
        ConfigError, match=r"rank 0 cannot send an object: .* at most 1000 bytes, but has \d+; send its tensors with hora.broadcast"
    ):
        hora.broadcast_object(large, max_bytes=1000)
    with pytest.raises(ConfigError, match="ranks 0 and 1 cannot send an object"):
        hora.all_gather_object(large, max_bytes=1000)
    assert hora.broadcast_object(large).numel() == 300


def message(text: str, payload: bytes = b"") -> torch.Tensor:
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "big") + text.encode() + payload), dtype=torch.uint8)


def test_packed_objects_come_back_and_tensors_begin_where_their_dtype_wants():
    found = Letter(Parcel.pack(tree(3), 10**6).letter(10**6)).open(CPU)
    assert all(tensor.storage_offset() == 0 for tensor in found["weights"])
    assert same(found, tree(3))


@pytest.mark.parametrize(
    "bad",
    [
        torch.empty(0, dtype=torch.uint8),
        message("not JSON"),
        message("[]"),
        message('{"tree": 1}'),
        message('{"tree": {"$nonsense": 1}, "tensors": []}'),
        message('{"tree": 1, "tensors": [["a", "object", [1], "cpu"]]}', bytes(8)),
        message('{"tree": 1, "tensors": [["a", "float32", [2], "cpu"]]}', bytes(4)),
        message('{"tree": 1, "tensors": [["a", "float32", [-1], "cpu"]]}', bytes(4)),
        message('{"tree": 1, "tensors": [["a", "float32", ["x"], "cpu"]]}', bytes(4)),
        message('{"tree": 1, "tensors": [["a"]]}'),
    ],
)
def test_bytes_that_no_rank_packed_are_refused(bad):
    with pytest.raises(ConfigError):
        Letter(bad).open(CPU)
