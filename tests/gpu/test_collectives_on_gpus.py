"""The collectives and the joining on CUDA: NCCL for several ranks, solo for one."""

import os
import signal
import socket
import threading
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from gpu_ranks import NUM_GPUS, SEVERAL, WORLD_SIZES, needs_two
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hora
from hora.comm import delivery
from hora.errors import ConfigError
from hora.testing import run_ranks, tell


def filled(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel(), device="cuda").remainder(5).view(shape) + rank + 1).to(dtype)


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    wide = torch.complex128
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found.to(wide), expected.to(wide))


@run_ranks(*WORLD_SIZES, backend="nccl")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "uint8"])
def test_reductions(world_size, dtype):
    dtype, rank = getattr(torch, dtype), hora.rank()
    for shape in [(0,), (1,), (7,), (world_size - 1,), (), (world_size, 3)]:
        stack = torch.stack([filled(shape, other, dtype).double() for other in range(world_size)])
        for op, expected in (("sum", stack.sum(0)), ("min", stack.amin(0)), ("max", stack.amax(0))):
            assert equal(hora.all_reduce(filled(shape, rank, dtype), op), expected.to(dtype))
            if shape:
                chunk = hora.reduce_scatter(filled(shape, rank, dtype), op)
                assert equal(chunk, expected.to(dtype).tensor_split(world_size)[rank])
        if dtype.is_floating_point:
            expected = stack.sum(0).to(dtype) / world_size
            assert equal(hora.all_reduce(filled(shape, rank, dtype), "mean"), expected)


@run_ranks(*WORLD_SIZES, backend="nccl")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int16", "complex64", "float8_e4m3fn"])
def test_moves(world_size, dtype):
    dtype, rank = getattr(torch, dtype), hora.rank()
    for shape in [(0,), (7,), (), (2, 3)]:
        assert equal(hora.broadcast(filled(shape, rank, dtype), world_size - 1), filled(shape, world_size - 1, dtype))
        for other, part in enumerate(hora.all_gather(filled(shape, rank, dtype))):
            assert equal(part, filled(shape, other, dtype))
    for other, part in enumerate(hora.all_gather(filled((rank, 2), rank, dtype))):
        assert equal(part, filled((other, 2), other, dtype))
    received = hora.all_to_all([filled((rank, to), rank + to, dtype) for to in range(world_size)])
    for sender, part in enumerate(received):
        assert equal(part, filled((sender, rank), sender + rank, dtype))


@needs_two
@run_ranks(*SEVERAL, backend="nccl")
def test_messages_go_round_the_ring(world_size):
    right, left = (hora.rank() + 1) % world_size, (hora.rank() - 1) % world_size
    received = torch.zeros(3, device="cuda", dtype=torch.int16)
    if hora.rank() == 0:
        hora.send(filled((3,), 0, torch.int16), right)
        hora.recv(received, left)
    else:
        hora.recv(received, left)
        hora.send(filled((3,), hora.rank(), torch.int16), right)
    assert equal(received, filled((3,), left, torch.int16))


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_async_results_are_ordered_with_the_current_stream(world_size):
    works = []
    for _ in range(20):
        tensor = torch.ones(1024, 1024, device="cuda")
        tensor = tensor @ tensor  # keeps the device busy while the host goes on
        works.append(hora.all_reduce(tensor, hora.ReduceOp.MEAN, async_op=True))
    assert all((work.wait() == 1024).all().item() for work in works)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert hora.all_reduce(torch.ones(8, device="cuda"), async_op=True).wait(timeout_s=30.0).sum().item() == 8 * world_size


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_objects_keep_the_kind_of_device_of_their_tensors():
    found = hora.broadcast_object({"gpu": torch.ones(2, device="cuda"), "cpu": torch.ones(2)} if hora.rank() == 0 else None)
    assert (found["gpu"].device, found["cpu"].device.type) == (hora.device(), "cpu")
    assert [one["rank"] for one in hora.all_gather_object({"rank": hora.rank()})] == list(range(hora.world_size()))


@run_ranks(*WORLD_SIZES, backend="nccl")
@pytest.mark.parametrize("chunk_bytes", [2**18 + 1, 2**24])
def test_large_objects_keep_the_kind_of_device_of_their_tensors(world_size, chunk_bytes):
    def tree(rank):
        return {"gpu": torch.full((500_000,), rank, device="cuda"), "cpu": torch.full((1000,), rank), "array": np.full(100_000, rank)}

    def check(found, rank):
        assert [found[name].device.type for name in ("gpu", "cpu")] == ["cuda", "cpu"]
        assert all(bool((found[name] == rank).all()) for name in found)

    rank = hora.rank()
    with mock.patch.object(delivery, "CHUNK_BYTES", chunk_bytes):
        check(hora.broadcast_object(tree(rank), world_size - 1), world_size - 1)
        for other, found in enumerate(hora.all_gather_object(tree(rank))):
            check(found, other)
        for other, found in enumerate(hora.gather_object(tree(rank)) or []):
            check(found, other)
        check(hora.scatter_object([tree(other) for other in range(world_size)] if rank == 0 else None), rank)


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_place_and_refusals():
    assert hora.device() == torch.device("cuda", hora.local_rank() % NUM_GPUS)
    assert torch.cuda.current_device() == hora.device().index
    with pytest.raises(ConfigError, match="must be on cuda"):
        hora.all_reduce(torch.ones(1))
    hora.barrier()


def body_alone() -> list:
    session = hora.init()
    connections = len(psutil.Process().net_connections())
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).cuda())
    model(torch.randn(4, 2, device="cuda")).sum().backward()
    total = hora.all_reduce(torch.ones(2, device="cuda"), async_op=True).wait()
    hora.shutdown()
    return [session.backend, str(session.device), connections, total.tolist()]


@pytest.mark.gpu
def test_process_alone_on_a_gpu_uses_solo_and_no_socket(spawn_ranks):
    (outcome,) = spawn_ranks(1, body_alone, join=False).wait(60.0)
    assert outcome.result == ["solo", "cuda:0", 0, [1.0, 1.0]], outcome


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def body_joins_twice(method: str) -> list:
    totals = []
    for _ in range(2):
        hora.init(init_method=method, rank=int(os.environ["NUMBER"]), world_size=2, timeout_s=60.0)
        totals.append(hora.all_reduce(torch.ones(1, device="cuda")).item())
        listening = [entry.laddr.ip for entry in psutil.Process().net_connections() if entry.status == psutil.CONN_LISTEN]
        hora.shutdown()
    return [totals, sorted(set(listening))]


@pytest.mark.gpu
@needs_two
def test_nccl_joins_twice_over_the_authenticated_store_on_loopback(spawn_ranks):
    method = free_address()
    ranks = [spawn_ranks(1, body_joins_twice, join=False, environ={"NUMBER": str(rank)}, method=method) for rank in range(2)]
    for rank in ranks:
        (outcome,) = rank.wait(90.0)
        assert outcome.kind == "passed", outcome
        totals, listening = outcome.result
        assert totals == [2.0, 2.0]
        assert set(listening) <= {"127.0.0.1"}, outcome


def body_refused(method: str, num_ranks: int) -> str:
    try:
        hora.init(init_method=method, rank=int(os.environ["NUMBER"]), world_size=num_ranks, timeout_s=30.0)
    except ConfigError as error:
        return str(error)
    return "joined"


@pytest.mark.gpu
def test_more_ranks_than_gpus_are_refused(spawn_ranks):
    method, world_size = free_address(), NUM_GPUS + 1
    ranks = [
        spawn_ranks(1, body_refused, join=False, environ={"NUMBER": str(rank), "HORA_SHARE_GPUS": "0"}, method=method, num_ranks=world_size)
        for rank in range(world_size)
    ]
    found = [rank.wait(60.0)[0].result for rank in ranks]
    assert all(f"shows {NUM_GPUS} to its {world_size} ranks" in refusal for refusal in found), found


def body_with_a_dead_peer() -> str:
    hora.all_reduce(torch.ones(4, device="cuda")).sum().item()
    tell("ready")
    if hora.rank() == 1:
        threading.Event().wait()
    work = hora.all_reduce(torch.ones(4, device="cuda"), async_op=True)
    try:
        work.wait(timeout_s=5.0)
    except Exception as error:
        tell("told")
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.gpu
@needs_two
def test_dead_peer_is_named_where_a_deadline_is_given(spawn_ranks):
    ranks = spawn_ranks(2, body_with_a_dead_peer, init={"device": "cuda", "timeout_s": 60.0})
    for number in range(2):
        ranks.await_event(number, "ready", 60.0)
    ranks.signal(1, signal.SIGKILL)
    (outcome,) = ranks.wait(60.0, but=1)
    assert "PeerLost: rank 0 lost rank 1 in all_reduce #2" in (outcome.result or outcome.text), outcome
