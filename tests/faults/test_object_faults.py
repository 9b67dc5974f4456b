"""Large objects when a rank dies on the way, and what they cost in memory."""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_collective_faults import LOOK_S, assert_error, failure

import hora
from hora.comm import delivery
from hora.errors import ConfigError, PeerLost

KILOBYTES, MEGABYTES = 2**10, 2**20


def body_that_sends_a_large_object(call: str, leave: bool = False) -> list:
    large = torch.ones(2 * MEGABYTES, dtype=torch.uint8)
    calls = {
        "broadcast": lambda: hora.broadcast_object(large, 1),
        "gather": lambda: hora.gather_object(large),
        "all_gather": lambda: hora.all_gather_object(large),
    }
    with mock.patch.object(delivery, "CHUNK_BYTES", 64 * KILOBYTES):
        found = failure(calls[call])
    if leave:
        hora.shutdown()
    return found


def fault(rank: int, point: str) -> dict:
    return {"HORA_FAULT": f"rank={rank},point={point},act=SIGKILL"}


@pytest.mark.parametrize("call", ["broadcast", "gather"])
def test_rank_that_dies_in_the_middle_of_a_large_object_is_named(spawn_ranks, call):
    ranks = spawn_ranks(3, body_that_sends_a_large_object, call=call, environ=fault(1, "collective.20"), init={"timeout_s": 5.0})
    first, dead, third = ranks.wait()
    assert dead.text == "killed by SIGKILL"
    for outcome in (first, third):
        assert_error(outcome, PeerLost, "lost rank 1 in ", r"Rank 1 \(process \d+ on .*\) is gone", within_s=LOOK_S)


def test_folder_goes_when_another_rank_dies(spawn_ranks, tmp_path):
    init = {"timeout_s": 5.0, "shared_dir": str(tmp_path)}
    environ = fault(1, "object.written")
    ranks = spawn_ranks(3, body_that_sends_a_large_object, call="all_gather", leave=True, environ=environ, init=init)
    first, dead, third = ranks.wait()
    assert dead.text == "killed by SIGKILL"
    for outcome in (first, third):
        # The other survivor may have left by then, too.
        assert_error(outcome, PeerLost, r"lost ranks? .*\b1\b.* in all_gather", r"Rank 1 \(process \d+ on .*\) is gone", within_s=LOOK_S)
    assert list(tmp_path.iterdir()) == []


def body_that_looks(path: str) -> list:
    hora.barrier()
    return [entry.name for entry in Path(path).iterdir()]


def test_folder_of_a_killed_rank_0_goes_at_the_next_start(spawn_ranks, tmp_path):
    environ = {"HORA_SHARED_DIR": str(tmp_path)}
    ranks = spawn_ranks(
        2, body_that_sends_a_large_object, call="all_gather", environ=environ | fault(0, "object.written"), init={"timeout_s": 5.0}
    )
    dead, survivor = ranks.wait()
    assert dead.text == "killed by SIGKILL"
    assert_error(survivor, PeerLost, "lost rank 0 in all_gather", within_s=LOOK_S)
    (left,) = tmp_path.iterdir()
    assert re.fullmatch("hora-objects-[0-9a-f]{32}", left.name)
    assert sum(path.stat().st_size for path in left.iterdir()) > 2 * MEGABYTES
    for outcome in spawn_ranks(2, body_that_looks, environ=environ, path=str(tmp_path)).wait():
        assert outcome.result == []


def body_that_joins_and_gathers(store: str, number: int) -> list:
    with mock.patch("hora.comm.shared_directory.PATIENCE_S", 0.2):
        here = hora.init(init_method=f"file://{store}", rank=number, world_size=2, device="cpu")
        try:
            found = hora.all_gather_object(torch.full((2 * MEGABYTES,), number, dtype=torch.uint8))
            return [str(here.shared.base), here.shared.folder is None, [int(one.sum()) for one in found]]
        finally:
            hora.shutdown()


def test_directories_that_are_not_one_are_found_out(spawn_ranks, tmp_path):
    """As on nodes that have a directory of this name each, but do not share it."""
    mine = [tmp_path / "first", tmp_path / "second"]
    for path in mine:
        path.mkdir()
    groups = [
        spawn_ranks(
            1, body_that_joins_and_gathers, join=False, environ={"HORA_SHARED_DIR": str(path)}, store=str(tmp_path / "store"), number=number
        )
        for number, path in enumerate(mine)
    ]
    for path, ranks in zip(mine, groups, strict=True):
        (outcome,) = ranks.wait()
        assert outcome.result == [str(path), True, [0, 2 * MEGABYTES]], outcome
        assert list(path.iterdir()) == []


def test_directory_that_all_may_write_is_refused_at_the_start(spawn_ranks, tmp_path):
    tmp_path.chmod(0o777)
    (outcome,) = spawn_ranks(1, body_that_looks, path=str(tmp_path), environ={"HORA_SHARED_DIR": str(tmp_path)}).wait()
    assert outcome.kind == "failed"
    assert f"{ConfigError.__name__}: the shared directory must be a directory in which other users cannot rename ours" in outcome.text


def peak_growth(act) -> int:
    """By how many bytes this process grows at most while it does `act`."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    act()
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def body_that_measures(size_bytes: int) -> dict[str, int]:
    """The growth of each call beyond what its result needs."""
    large, long = torch.ones(size_bytes, dtype=torch.uint8), b"\x01" * size_bytes
    rank, world_size = hora.rank(), hora.world_size()
    calls = {
        "broadcast": (lambda: hora.broadcast_object(large), 1),
        "all_gather": (lambda: hora.all_gather_object({"a": large}), world_size),
        "gather": (lambda: hora.gather_object(large), world_size if rank == 0 else 0),
        "scatter": (lambda: hora.scatter_object([large] * world_size if rank == 0 else None), 1),
        "bytes": (lambda: hora.gather_object(long), world_size if rank == 0 else 0),
    }
    with mock.patch.object(delivery, "CHUNK_BYTES", MEGABYTES):
        hora.all_gather_object(large[: 2 * MEGABYTES])  # opens what is opened once
        return {name: peak_growth(act) - num_objects * size_bytes for name, (act, num_objects) in calls.items()}


@pytest.mark.parametrize("route", ["network", "shared"])
def test_large_objects_need_little_more_memory_than_their_copies(spawn_ranks, tmp_path, route):
    init = {"shared_dir": str(tmp_path)} if route == "shared" else {}
    object_bytes, slack_bytes = 32 * MEGABYTES, 8 * MEGABYTES
    for outcome in spawn_ranks(4, body_that_measures, size_bytes=object_bytes, init=init).wait(60.0):
        assert outcome.kind == "passed", outcome
        # Bytes are no tensors: one of them is there twice while it is made.
        too_much = {name: grown for name, grown in outcome.result.items() if grown > slack_bytes + (name == "bytes") * object_bytes}
        assert not too_much
