"""Algorithms on GPUs, and the memory that GPUs share: sums of 2 to 8 ranks, in the order of the tree, in CUDA graphs, and past the deadline."""

import time
from unittest import mock

import pytest
import torch
from gpu_ranks import SEVERAL, UNSHARED, WORLD_SIZES, needs_two, needs_two_gpus
from test_collectives_on_gpus import equal, filled

import hora
from hora.comm.peer_memory import sharing
from hora.comm.peer_memory.sharing import _try_kernels
from hora.comm.peer_memory.window import DTYPES, Window, flag_bytes, window_bytes
from hora.comm.session import session
from hora.plan.logical import LogicalRanks
from hora.testing import run_ranks

SHAPES = [(0,), (1,), (7,), (513,), (100_003,), (1 << 20,), (3_000_000,)]


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The oracle: sums of neighbours, of these, and so on."""
    return LogicalRanks(len(parts), len(parts)).total([(range(i, i + 1), part) for i, part in enumerate(parts)], torch.add)


def noise(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(numel, device="cuda", generator=generator) * 1000).to(dtype)


FEW_BLOCKS = 8
"""So few that those of all ranks run at the same time on one GPU."""


def load_kernels(world_size: int, tensor: torch.Tensor, read_all: bool) -> None:
    """Nothing can be loaded while a kernel waits for a rank that this very thread is to start."""
    memory = torch.zeros(window_bytes(world_size, FEW_BLOCKS), dtype=torch.uint8, device="cuda")
    memory[: flag_bytes(world_size, FEW_BLOCKS)].view(torch.int64).fill_(1 << 32)
    fault = torch.zeros((), dtype=torch.int32).pin_memory()
    Window(memory, FEW_BLOCKS, [memory.data_ptr()] * world_size, 0, 20.0, fault).all_reduce(tensor.clone(), read_all=read_all)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("ways", [(False,), (True,), (True, False, False, True)])
def test_kernels_sum_as_the_tree_does_for_all_numbers_of_ranks(world_size, ways):
    """The ranks are streams of one GPU."""
    fault = torch.zeros((), dtype=torch.int32).pin_memory()
    memories = [torch.zeros(window_bytes(world_size, FEW_BLOCKS), dtype=torch.uint8, device="cuda") for _ in range(world_size)]
    addresses = [memory.data_ptr() for memory in memories]
    windows = [Window(memory, FEW_BLOCKS, addresses, rank, 20.0, fault) for rank, memory in enumerate(memories)]
    streams = [torch.cuda.Stream() for _ in windows]
    dtypes = sorted(DTYPES, key=str) if world_size == 3 else [torch.float32]  # each is compiled
    calls = [(dtype, numel) for dtype in dtypes for numel in (16, 100_000, 16, 2_000_000, 5, 700_001)]
    for call, (dtype, numel) in enumerate(calls):
        parts = [noise(numel, dtype, 100 * call + rank) for rank in range(world_size)]
        expected, found = tree_sum(parts), [part.clone() for part in parts]
        read_all = ways[call % len(ways)]
        load_kernels(world_size, parts[0], read_all)
        torch.cuda.synchronize()
        for window, stream, tensor in zip(windows, streams, found, strict=True):
            with torch.cuda.stream(stream):
                window.all_reduce(tensor, read_all=read_all)
        torch.cuda.synchronize()
        assert all(torch.equal(tensor, expected) for tensor in found), (dtype, numel)
    assert fault.item() == 0


@pytest.mark.gpu
def test_kernels_that_cannot_be_compiled_leave_the_sums_to_nccl():
    _try_kernels(torch.device("cuda", 0))
    broken = mock.patch.object(Window, "_compile", side_effect=RuntimeError("Failed to find C compiler"))
    with broken, pytest.raises(RuntimeError, match="compiler"):
        _try_kernels(torch.device("cuda", 0))


@needs_two_gpus
@run_ranks(*[n for n in UNSHARED if n > 1] or [2], backend="nccl")
def test_one_rank_that_cannot_share_makes_all_use_nccl(world_size):
    groups = session().groups
    problem = RuntimeError("out of memory") if hora.rank() == 1 else None
    with mock.patch.object(sharing, "allocate_for_peers", wraps=sharing.allocate_for_peers, side_effect=problem):
        assert sharing.share(groups.world, hora.device(), 60.0) is None
    assert sharing.share(groups.world, hora.device(), 60.0) is not None


@run_ranks(*WORLD_SIZES, backend="nccl")
@pytest.mark.parametrize("algorithm", ["native", "ring", "recursive_doubling", "ordered", "hierarchical", "symmetric", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8"])
def test_every_algorithm_reduces_every_type(world_size, algorithm, dtype):
    dtype, rank = getattr(torch, dtype), hora.rank()
    for shape in [(0,), (1,), (7,), (world_size - 1,), (), (world_size, 3), (1025,)]:
        stack = torch.stack([filled(shape, other, dtype).double() for other in range(world_size)])
        for op, expected in (("sum", stack.sum(0)), ("min", stack.amin(0)), ("max", stack.amax(0)), ("product", stack.prod(0))):
            assert equal(hora.all_reduce(filled(shape, rank, dtype), op, algorithm=algorithm), expected.to(dtype)), (shape, op)
    strided = filled((6, 4), rank, dtype)[:, ::2]
    stack = torch.stack([filled((6, 4), other, dtype)[:, ::2].double() for other in range(world_size)])
    assert equal(hora.all_reduce(strided, algorithm=algorithm), stack.sum(0).to(dtype))


@needs_two_gpus
@run_ranks(*[n for n in UNSHARED if n > 1] or [2], backend="nccl")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_symmetric_has_the_bits_of_ordered_with_and_without_shared_memory(world_size, dtype):
    dtype, groups = getattr(torch, dtype), session().groups
    assert groups.peer_memory(hora.device()) is not None
    for call, shape in enumerate(SHAPES):
        parts = [noise(shape[0], dtype, 10 * call + rank) for rank in range(world_size)]
        expected = tree_sum(parts)
        for algorithm in ("symmetric", "ordered"):
            assert torch.equal(hora.all_reduce(parts[hora.rank()].clone(), algorithm=algorithm), expected), (shape, algorithm)
        with mock.patch.object(groups, "_peer_memory", None):
            assert torch.equal(hora.all_reduce(parts[hora.rank()].clone(), algorithm="ordered"), expected), shape


@needs_two
@run_ranks(*SEVERAL, backend="nccl")
def test_calls_on_several_streams_go_one_after_the_other(world_size):
    streams = [torch.cuda.Stream() for _ in range(3)]
    tensors = []
    for call in range(60):
        with torch.cuda.stream(streams[call % 3]):
            tensors.append(torch.full((1 + 7919 * call,), float(hora.rank() + call), device="cuda"))
            hora.all_reduce(tensors[-1], algorithm="symmetric")
    torch.cuda.synchronize()
    ranks = sum(range(world_size))
    assert all(bool((tensor == ranks + call * world_size).all()) for call, tensor in enumerate(tensors))


@needs_two
@run_ranks(*SEVERAL, backend="nccl")
@pytest.mark.parametrize("algorithm", ["native", "symmetric", "ordered", "auto"])
def test_calls_in_a_graph_are_made_anew_at_each_replay(world_size, algorithm):
    sizes = [1, 1000, 300_000]
    tensors = [torch.zeros(size, device="cuda") for size in sizes]

    def reduce() -> None:
        for tensor in tensors:
            hora.all_reduce(tensor, algorithm=algorithm)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        reduce()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduce()
    for replay in range(5):
        for tensor in tensors:
            tensor.fill_(hora.rank() + replay)
        graph.replay()
        eager = hora.all_reduce(torch.full((77,), float(hora.rank()), device="cuda"), algorithm=algorithm)  # between replays
        assert all(bool((tensor == sum(range(world_size)) + replay * world_size).all()) for tensor in tensors)
        assert bool((eager == sum(range(world_size))).all())


def body_without_the_other() -> None:
    tensor = torch.ones(1000, device="cuda")
    hora.all_reduce(tensor, algorithm="symmetric")
    if hora.rank() == 1:
        time.sleep(12.0)
    try:
        hora.all_reduce(tensor, algorithm="symmetric")
        tensor.sum().item()
    finally:
        hora.shutdown()


def end_without_rank_1(spawn_ranks, body) -> None:
    """Rank 0 of `body` does not wait longer than the deadline, and says for whom."""
    begin = time.monotonic()
    outcomes = spawn_ranks(2, body, init={"device": "cuda", "timeout_s": 4.0, "check_calls": False}).wait(60.0)
    assert outcomes[0].kind in ("failed", "died"), outcomes[0]  # by the exception, or because NCCL cannot go on without its GPU
    assert "a sum on the GPU timed out: rank 1 did not take part within 4 s" in outcomes[0].printed, outcomes[0]
    assert time.monotonic() - begin < 40.0


@needs_two_gpus
@pytest.mark.gpu
def test_a_kernel_does_not_wait_longer_than_the_deadline_and_says_for_whom(spawn_ranks):
    end_without_rank_1(spawn_ranks, body_without_the_other)
