"""What goes wrong between ranks that share memory: dead, stopped and absent peers, memory that cannot be shared, no compiler."""

import os
import resource
import signal
import stat
import subprocess
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hora
from hora import env
from hora.comm.backends.shm import build, segment
from hora.comm.backends.shm import group as group_module
from hora.errors import ConfigError
from hora.testing import run_ranks, tell

LONG_S = 60.0
NOTICED_S = 1.0
ENGINES = pytest.mark.parametrize("kernel", ["1", "0"])


def wait_for_ever() -> None:
    signal.pause()


def seconds_to_fail(call) -> list:
    begun = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]
    return ["nothing", "", time.monotonic() - begun]


def body_with_a_peer_that_dies(call: str, timeout_s: float, lanes: int = 1) -> list:
    group_module.lanes_for = lambda size: lanes
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=timeout_s))
    dist.barrier(group=group)
    if hora.rank() == 1:
        tell("ready")
        wait_for_ever()
    tensor = torch.ones(500_000)
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "async": lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
        "future": lambda: dist.all_reduce(tensor, group=group, async_op=True).get_future().wait(),
        "recv": lambda: dist.recv(tensor, 1, group=group),
        "send": lambda: dist.send(tensor, 1, group=group),
    }
    return seconds_to_fail(calls[call])


@ENGINES
@pytest.mark.parametrize("call", ["all_reduce", "async", "future", "recv", "send"])
def test_peer_that_is_killed_is_noticed_at_once(spawn_ranks, kernel, call):
    ranks = spawn_ranks(3, body_with_a_peer_that_dies, environ={env.SHM_KERNEL: kernel}, call=call, timeout_s=LONG_S)
    ranks.await_event(1, "ready")
    ranks.signal(1, signal.SIGKILL)
    for outcome in ranks.wait(but=1):
        _, text, seconds = outcome.result
        assert "rank 1 of the group is gone" in text or "rank 2 of the group is gone" in text or "has left the group" in text, outcome
        assert seconds < NOTICED_S + 1.0


def test_peer_that_is_killed_is_noticed_by_several_threads(spawn_ranks):
    ranks = spawn_ranks(2, body_with_a_peer_that_dies, call="all_reduce", timeout_s=LONG_S, lanes=3)
    ranks.await_event(1, "ready")
    ranks.signal(1, signal.SIGKILL)
    (outcome,) = ranks.wait(but=1)
    assert "rank 1 of the group is gone" in outcome.result[1]
    assert outcome.result[2] < NOTICED_S


def body_without_memory_for_threads() -> list:
    group_module.lanes_for = lambda size: 3
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=LONG_S))
    tensor = torch.ones(500_000)
    dist.barrier(group=group)
    if hora.rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**20, resource.RLIM_INFINITY))
    found = seconds_to_fail(lambda: dist.all_reduce(tensor, group=group))
    if hora.rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return found


def test_rank_that_gets_no_threads_says_so_and_holds_nobody_up(spawn_ranks):
    first, second = spawn_ranks(2, body_without_memory_for_threads).wait()
    assert "the system gives this rank no more threads" in second.result[1]
    assert "rank 1 has left the group" in first.result[1]
    assert max(first.result[2], second.result[2]) < NOTICED_S


@ENGINES
def test_peer_that_does_not_come_is_named_at_the_deadline(spawn_ranks, kernel):
    ranks = spawn_ranks(2, body_with_a_peer_that_dies, environ={env.SHM_KERNEL: kernel}, call="all_reduce", timeout_s=1.0)
    (outcome,) = ranks.wait(but=1)
    kind, text, seconds = outcome.result
    assert (kind, text) == ("Failed", "timed out: rank 0 waited 1.0 s for rank 1 of its group")
    assert 1.0 <= seconds < 1.0 + NOTICED_S


def body_that_goes_on_after_a_failure() -> list:
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=1))
    if hora.rank() == 1:
        tell("ready")
        wait_for_ever()
    first = seconds_to_fail(lambda: dist.barrier(group=group))
    return [first[1], seconds_to_fail(lambda: dist.barrier(group=group))[1]]


def test_group_is_of_no_use_after_a_call_has_failed(spawn_ranks):
    (outcome,) = spawn_ranks(2, body_that_goes_on_after_a_failure).wait(but=1)
    first, second = outcome.result
    assert first.startswith("timed out")
    assert second == f"the group is of no use any more since a call has failed: {first}"


def body_of_ddp_with_a_peer_that_dies() -> list:
    model = DistributedDataParallel(nn.Linear(256, 256))
    for step in range(100):
        if hora.rank() == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        found = seconds_to_fail(lambda: model(torch.ones(4, 256)).sum().backward())
        if found[0] != "nothing":
            return found
    return found


@ENGINES
def test_distributed_data_parallel_raises_when_a_peer_dies(spawn_ranks, kernel):
    """A future with a Python exception set in it would crash the reducer, and a `Work` made of a future would lose it."""
    ranks = spawn_ranks(2, body_of_ddp_with_a_peer_that_dies, environ={env.SHM_KERNEL: kernel})
    (outcome,) = ranks.wait(but=1)
    kind, text, seconds = outcome.result
    assert kind == "RuntimeError"
    assert "rank 1 of the group is gone" in text
    assert seconds < NOTICED_S


def body_with_a_callback_that_makes_a_collective() -> float:
    """As PowerSGD does: a thread that carries out collectives must not run callbacks, for they would wait for it."""

    def again(done):
        tensor = done.value()[0]
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    return dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again).wait()[0].item()


def test_callback_may_make_a_collective_and_wait_for_it(spawn_ranks):
    assert [outcome.result for outcome in spawn_ranks(2, body_with_a_callback_that_makes_a_collective).wait()] == [4.0, 4.0]


def body_that_cannot_share(asked: str | None) -> list:
    if int(os.environ["NUMBER"]) == 1:
        segment.Segment._open = _refused
    try:
        hora.init(
            init_method=os.environ["METHOD"], rank=int(os.environ["NUMBER"]), world_size=2, device="cpu", timeout_s=20.0, backend=asked
        )
    except ConfigError as error:
        return ["refused", str(error)]
    total = hora.all_reduce(torch.ones(1)).item()
    backend = hora.session().backend
    hora.shutdown()
    return [backend, total]


def _refused(self: segment.Segment, store: object) -> int:
    raise PermissionError(13, "Permission denied", "/proc/1/fd/7")


@pytest.mark.parametrize("asked", [None, "shm"])
def test_ranks_that_cannot_share_memory_use_the_network_unless_told_otherwise(spawn_ranks, asked, tmp_path):
    groups = [
        spawn_ranks(
            1, body_that_cannot_share, join=False, asked=asked, environ={"NUMBER": str(number), "METHOD": f"file://{tmp_path / 'store'}"}
        )
        for number in range(2)
    ]
    for group in groups:
        (outcome,) = group.wait()
        if asked is None:
            assert outcome.result == ["gloo", 2.0]
        else:
            assert outcome.result[0] == "refused"
            assert "must share memory, but rank 1 cannot: [Errno 13] Permission denied" in outcome.result[1]


@run_ranks(2, nodes=(0, 1))
def test_ranks_of_two_nodes_use_the_network():
    assert hora.session().backend == "gloo"
    assert hora.all_reduce(torch.ones(1)).item() == 2.0


def body_that_is_killed_in_a_collective() -> None:
    hora.barrier()
    if hora.rank() == 0:
        tell("ready")
        wait_for_ever()
    tell("ready")
    hora.all_reduce(torch.ones(10_000_000))


def test_nothing_is_left_of_ranks_that_are_killed(spawn_ranks):
    before = set(os.listdir("/dev/shm"))
    ranks = spawn_ranks(2, body_that_is_killed_in_a_collective)
    for number in range(2):
        ranks.await_event(number, "ready")
    for number in range(2):
        ranks.signal(number, signal.SIGKILL)
    ranks.wait(but=(0, 1))
    assert set(os.listdir("/dev/shm")) == before


# The kernel ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory in place of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load_kernel.cache_clear()
    yield tmp_path / "hora"
    build.load_kernel.cache_clear()


def test_kernel_is_built_once_and_kept(cache, monkeypatch):
    assert build.load_kernel() is not None
    (library,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    build.load_kernel.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)  # would fail if it were called
    assert build.load_kernel() is not None
    assert list(cache.iterdir()) == [library]


def test_without_a_compiler_there_is_no_kernel(cache, monkeypatch):
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    assert build.load_kernel() is None
    assert list(cache.iterdir()) == []


def test_compiler_that_fails_leaves_nothing(cache, monkeypatch):
    monkeypatch.setattr(build, "_OPTIONS", ("--no-such-option",))
    assert build.load_kernel() is None
    assert list(cache.iterdir()) == []


def test_directory_that_others_can_write_to_is_not_trusted(cache):
    cache.mkdir()
    cache.chmod(0o777)
    assert build.load_kernel() is None
    assert list(cache.iterdir()) == []


def test_kernel_can_be_switched_off(cache, monkeypatch):
    monkeypatch.setenv(env.SHM_KERNEL, "0")
    assert build.load_kernel() is None
    assert not cache.exists()
