import dataclasses
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch

import hora
from hora.comm import delivery, objects
from hora.comm.codec import encode
from hora.comm.parcel import Letter, Opened, Parcel
from hora.comm.shared_directory import Folder, SharedDirectory
from hora.errors import CollectiveError, CollectiveMismatch, ConfigError
from hora.testing import run_ranks

CPU = torch.device("cpu")
ROUTES = ["inline", "network", "shared"]


@dataclasses.dataclass(frozen=True)
class Sample:
    words: list[str]
    scores: np.ndarray


def tree(rank: int) -> dict:
    return {
        "rank": rank,
        "name": "é" * rank,
        "pair": (1.1, [None, True, b"\x00\xff"]),
        "numbers": {0: math.inf, -1: 2**70, None: 1j, (1, b"x"): {1.5, "a", frozenset({2})}},
        "weights": [torch.arange(rank), torch.tensor(1.5, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bool)],
        "gaps": [torch.arange(12.0).view(3, 4).t(), torch.arange(6.0)[::2], torch.ones(1).expand(5), torch.tensor([1j]).conj()],
        "arrays": [np.arange(rank * 100.0), np.array(["a", "bc"]), np.float32(rank)],
        "sample": Sample(["a"] * 300, np.arange(5, dtype=">i2")),
        "long": (b"\x01" * 70_001, "ö" * 65_537),
    }


def fingerprint(found) -> tuple:
    """All there is to a tree."""
    skeleton, tensors = encode(found)
    return repr(skeleton), [(name, tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()]


def same(first, second) -> bool:
    return fingerprint(first) == fingerprint(second)


@contextmanager
def going(route: str, base: Path | None = None, chunk_bytes: int = 39_999) -> Iterator[None]:
    """Objects of any size go this way."""
    here = hora.session()
    before, here.shared = here.shared, SharedDirectory(base if route == "shared" else None)
    limits = dict.fromkeys(("INLINE_BYTES", "_INLINE_BYTES_FOR_ONE"), 2**20 if route == "inline" else -1)
    try:
        with mock.patch.multiple(objects, **limits), mock.patch.object(delivery, "CHUNK_BYTES", chunk_bytes):
            yield
    finally:
        here.shared.close()
        here.shared = before


@pytest.mark.parametrize("route", ROUTES)
@run_ranks(1, 2, 3, 4)
def test_broadcast_object_gives_what_the_source_has(world_size, route, tmp_path):
    with going(route, tmp_path):
        for src in range(world_size):
            found = hora.broadcast_object(tree(5) if hora.rank() == src else object(), src)
            assert same(found, tree(5))
            assert isinstance(found["sample"], Sample)


@pytest.mark.parametrize("route", ROUTES)
@run_ranks(1, 2, 3, 4)
def test_all_gather_object_gives_all_by_rank(world_size, route, tmp_path):
    with going(route, tmp_path):
        found = hora.all_gather_object(tree(hora.rank()))
    assert len(found) == world_size
    assert all(same(one, tree(rank)) for rank, one in enumerate(found))


@pytest.mark.parametrize("route", ROUTES)
@run_ranks(1, 2, 3, 4)
def test_gather_object_gives_all_to_one_rank(world_size, route, tmp_path):
    with going(route, tmp_path):
        for dst in range(world_size):
            found = hora.gather_object(tree(hora.rank()), dst)
            if hora.rank() != dst:
                assert found is None
                continue
            assert len(found) == world_size
            assert all(same(one, tree(rank)) for rank, one in enumerate(found))


@pytest.mark.parametrize("route", ROUTES)
@run_ranks(1, 2, 3, 4)
def test_scatter_object_gives_each_rank_its_own(world_size, route, tmp_path):
    with going(route, tmp_path):
        for src in range(world_size):
            found = hora.scatter_object([tree(rank) for rank in range(world_size)] if hora.rank() == src else None, src)
            assert same(found, tree(hora.rank()))


@pytest.mark.parametrize("route", ROUTES)
@run_ranks(1, 2)
def test_small_objects_of_every_kind_pass(route, tmp_path):
    with going(route, tmp_path):
        for obj in (None, "", [], {}, 0, False, b"", torch.empty(0), set(), np.empty((0, 2))):
            assert repr(hora.all_gather_object(obj)) == repr([obj] * hora.world_size())


@run_ranks(1, 2)
def test_what_comes_is_a_copy_on_the_source_too():
    for route in ("inline", "network"):
        with going(route):
            mine = {"tensor": torch.zeros(1000), "array": np.zeros(1000)}
            found = hora.broadcast_object(mine)
            found["tensor"].fill_(1)
            found["array"].fill(1)
            assert mine["tensor"].sum() == mine["array"].sum() == 0


@run_ranks(3)
def test_large_and_small_objects_go_together(world_size):
    large = torch.arange(300_000.0)
    found = hora.all_gather_object(large if hora.rank() == 1 else hora.rank())
    assert [found[0], found[2]] == [0, 2]
    assert torch.equal(found[1], large)


@pytest.mark.parametrize("route", ROUTES)
@run_ranks(2, 3)
def test_object_that_cannot_be_sent_is_an_error_on_every_rank(route, tmp_path):
    first = hora.rank() == 0
    with going(route, tmp_path):
        with pytest.raises(
            ConfigError, match=r"rank 1 cannot send an object: state\.optimizer\.0\.lr must be None, .* is builtins\.range instead"
        ):
            hora.broadcast_object({"state": {"optimizer": [{"lr": range(1)}]}} if hora.rank() == 1 else None, 1)
        with pytest.raises(ConfigError, match=r"rank 0 cannot send an object: a must be None, bool, .* but is builtins\.range instead"):
            hora.all_gather_object({"a": range(1)} if first else {})
        with pytest.raises(ConfigError, match=r"rank 0 cannot send an object: a must be None"):
            hora.gather_object({"a": range(1)} if first else {}, 1)
        with pytest.raises(ConfigError, match=r"rank 0 cannot send an object: 1\.lr must be None"):
            hora.scatter_object([1, {"lr": object()}, 3][: hora.world_size()] if first else None)
        with pytest.raises(
            ConfigError, match=r"rank 0 cannot send an object: scatter_object takes a list of \d objects, one a rank, but got 1 of"
        ):
            hora.scatter_object([1] if first else None)
        with pytest.raises(ConfigError, match=r"rank 0 cannot send an object: .* but got NoneType"):
            hora.scatter_object(None)
        assert hora.gather_object(1, 1) == ([1] * hora.world_size() if hora.rank() == 1 else None)


class Trap(dict):
    def items(self):
        raise RuntimeError("no items today")


@run_ranks(2)
def test_object_that_raises_while_it_is_taken_apart_is_an_error_on_every_rank():
    with pytest.raises(ConfigError, match=r"rank 1 cannot send an object: it cannot be taken apart: RuntimeError: no items today"):
        hora.all_gather_object(Trap() if hora.rank() == 1 else 1)
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


@run_ranks(3)
def test_calls_that_differ_between_ranks_are_named():
    rank = hora.rank()
    with pytest.raises(
        CollectiveMismatch, match=r"ranks 0 and 2 are about to .*'gather_object to rank 0'.* rank 1 is .*'gather_object to rank 1'"
    ):
        hora.gather_object(1, 1 if rank == 1 else 0)
    with pytest.raises(CollectiveMismatch, match=r"'scatter_object'.*rank 1 is about to .*'scatter_object of at most 10 bytes'"):
        hora.scatter_object([1, 2, 3], **({"max_bytes": 10} if rank == 1 else {}))
    with pytest.raises(ConfigError, match="dst must be a rank from 0 to 2, but is 3 instead"):
        hora.gather_object(1, 3)


@pytest.mark.parametrize("route", ROUTES)
@run_ranks(2)
def test_dataclass_that_is_not_loaded_is_an_error_where_it_is_not(route, tmp_path):
    module = ModuleType("only_on_rank_0")
    module.Point = dataclasses.make_dataclass("Point", ["x"], namespace={"__module__": "only_on_rank_0"})
    if hora.rank() == 0:
        sys.modules["only_on_rank_0"] = module
    try:
        with going(route, tmp_path):
            if hora.rank() == 0:
                assert hora.broadcast_object(module.Point(1)).x == 1
            else:
                with pytest.raises(ConfigError, match="the dataclass 'only_on_rank_0:Point' must be loaded in this process"):
                    hora.broadcast_object(None)
    finally:
        sys.modules.pop("only_on_rank_0", None)
    hora.barrier()


@pytest.mark.parametrize("route", ["network", "shared"])
@run_ranks(3)
def test_rank_without_memory_is_named_on_every_rank(route, tmp_path):
    failure = mock.patch.object(Opened, "_read", side_effect=MemoryError("no room"))
    with going(route, tmp_path):
        with pytest.raises(CollectiveError, match=r"rank 2 could not (receive|read) the object of rank 0.*: .*no room"):
            if hora.rank() == 2:
                with failure:
                    hora.broadcast_object(1)
            else:
                hora.broadcast_object(1)
        assert hora.broadcast_object("again") == "again"


@run_ranks(3)
def test_rank_without_memory_for_a_copy_of_its_own_is_named_on_every_rank():
    failure = mock.patch.object(Opened, "_read", side_effect=MemoryError("no room"))
    with going("network"), pytest.raises(CollectiveError, match=r"rank 0 could not receive the object of rank 0: .*no room"):
        if hora.rank() == 0:
            with failure:
                hora.gather_object(1)
        else:
            hora.gather_object(1)
    hora.barrier()


def files_in(base: Path) -> list[str]:
    return sorted(path.name for path in base.glob("hora-objects-*/*") if path.name not in ("owner", "token"))


@run_ranks(2, 4)
def test_files_go_when_all_have_read_and_the_folder_at_the_end(tmp_path):
    with going("shared", tmp_path):
        for _ in range(2):
            hora.all_gather_object(tree(hora.rank()))
        hora.gather_object(tree(1), 1)
        hora.barrier()
        assert files_in(tmp_path) == []
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        hora.barrier()
    hora.barrier()
    assert list(tmp_path.iterdir()) == []


def spoiling_rename(change):
    """Every file is spoilt before others see it."""
    from hora.comm import shared_directory

    def rename(src, dst, *, src_dir_fd, dst_dir_fd):
        with open(src, "r+b", opener=lambda name, flags: real_open(name, flags, dir_fd=src_dir_fd)) as file:
            change(file)
        real_rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    real_open, real_rename = shared_directory.os.open, shared_directory.os.rename
    return mock.patch.object(shared_directory.os, "rename", rename)


@pytest.mark.parametrize("how", ["a bit", "shorter", "longer", "removed"])
@run_ranks(2)
def test_damaged_file_is_refused_on_every_rank(how, tmp_path):
    def change(file):
        if how == "a bit":
            file.seek(-1, 2)
            file.write(b"\xff")
        else:
            file.truncate(1000 if how == "shorter" else 1_000_000)

    said = {"a bit": "its digest must be .*: it was changed or damaged", "removed": "No such file"}.get(
        how, "it must be a file of .* bytes"
    )
    spoil = (
        mock.patch.object(Folder, "reading", side_effect=FileNotFoundError("No such file")) if how == "removed" else spoiling_rename(change)
    )
    with going("shared", tmp_path):
        refused = pytest.raises(CollectiveError, match=rf"ranks 0 and 1 could not read the object of rank 1 in {tmp_path}.*: .*{said}")
        with spoil, mock.patch("hora.comm.shared_directory.PATIENCE_S", 0.1), refused:
            hora.broadcast_object(np.zeros(5000), 1)
        hora.barrier()
        assert files_in(tmp_path) == []
        assert hora.broadcast_object("again", 1) == "again"


@run_ranks(2, 3)
def test_directories_that_are_not_one_are_not_used(tmp_path, world_size):
    mine = tmp_path / str(hora.rank())
    mine.mkdir()
    with (
        mock.patch("hora.comm.shared_directory.PATIENCE_S", 0.1),
        mock.patch.object(delivery, "_leave_files") as leave,
        going("shared", mine),
    ):
        assert all(same(one, tree(rank)) for rank, one in enumerate(hora.all_gather_object(tree(hora.rank()))))
        assert hora.session().shared.folder is None
        assert list(mine.iterdir()) == []
    leave.assert_not_called()


@run_ranks(2)
def test_directory_that_one_rank_lacks_is_not_used(tmp_path):
    with going("shared", None if hora.rank() == 1 else tmp_path):
        assert hora.broadcast_object("x") == "x"
        assert hora.session().shared.folder is None
    assert list(tmp_path.iterdir()) == []


@run_ranks(2)
def test_folder_that_another_token_stands_in_is_not_used(tmp_path):
    """Two file systems with the same folder in both, such as a copy."""
    spoil = mock.patch("hora.comm.shared_directory._read_token", return_value="another")
    with spoil, going("shared", tmp_path):
        assert hora.broadcast_object("x") == "x"
        assert hora.session().shared.folder is None
    hora.barrier()
    assert list(tmp_path.iterdir()) == []


@run_ranks(3)
def test_object_of_a_rank_that_cannot_write_goes_over_the_network(tmp_path):
    failure = mock.patch.object(Folder, "writing", side_effect=OSError(28, "No space left on device"))
    with going("shared", tmp_path):
        if hora.rank() == 1:
            with failure:
                found = hora.all_gather_object(tree(hora.rank()))
        else:
            found = hora.all_gather_object(tree(hora.rank()))
        assert all(same(one, tree(rank)) for rank, one in enumerate(found))
        assert hora.session().shared.folder is not None


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
        message("[" * 100_000),
        message('{"tree": 1}'),
        message('{"tree": {"$nonsense": 1}, "tensors": []}'),
        message('{"tree": 1, "tensors": [["a", "object", [1], "cpu"]]}', bytes(8)),
        message('{"tree": 1, "tensors": [["a", "float32", [2], "cpu"]]}', bytes(4)),
        message('{"tree": 1, "tensors": [["a", "float32", [1], "cpu"]]}', bytes(8)),
        message('{"tree": 1, "tensors": [["a", "float32", [-1], "cpu"]]}', bytes(4)),
        message('{"tree": 1, "tensors": [["a", "float32", ["x"], "cpu"]]}', bytes(4)),
        message('{"tree": 1, "tensors": [["a", "float32", [true], "cpu"]]}', bytes(4)),
        message('{"tree": 1, "tensors": [["a", "float32", [1152921504606846976], "cpu"]]}', bytes(4)),
        message('{"tree": 1, "tensors": [["a"]]}'),
        message('{"large": [1]}'),
        message('{"large": [1, -1]}'),
        message('{"large": [1, 1.5]}'),
        message('{"large": "ab"}'),
    ],
)
def test_bytes_that_no_rank_packed_are_refused(bad):
    with pytest.raises(ConfigError):
        Letter(bad).open(CPU)


def test_nothing_larger_than_announced_is_allocated():
    head = b'{"tree": 1, "tensors": [["a", "uint8", [1000000000000], "cpu"], ["b", "uint8", [0, 9], "cpu"]]}'
    with mock.patch("torch.empty") as empty, pytest.raises(ConfigError, match="its tensors have 1000000000000 bytes, and 4 were announced"):
        Opened.read(head, 4, CPU)
    empty.assert_not_called()
