"""Sums by copy engines: the bits of the tree, whoever is late, in CUDA graphs, in training steps, and past the deadline."""

import os
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from gpu_ranks import UNSHARED, needs_two_gpus
from test_peer_memory_on_gpus import end_without_rank_1, noise, tree_sum
from test_train_step_on_gpus import OPTIMIZERS, train

import hora
from hora import env
from hora.comm.flat import pull_sum
from hora.comm.peer_memory.pulling import PULLED_DTYPES, Divisor, Layout, Pulling
from hora.comm.session import session
from hora.sync import sums
from hora.testing import run_ranks

SEVERAL = [n for n in UNSHARED if n > 1] or [2]
NUMELS = (1, 100_003, 64, 3_000_000)


def wanted():
    """On more than two GPUs copy engines are left out where NCCL may have multicast."""
    return mock.patch.dict(os.environ, {"NCCL_NVLS_ENABLE": "0"})


def pulling_for(numels, dtypes) -> Pulling | None:
    here = session()
    with wanted():
        return here.groups.pulling(here.device, numels, dtypes)


def late(rank: int, call: int) -> None:
    """Some ranks are late with some calls."""
    torch.cuda._sleep(300_000 * ((rank * 7 + call * 5) % 4))


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_are_late_get_what_the_others_get(world_size: int) -> None:
    """The ranks are streams of one GPU, whose queues are enough for three.

    Nothing can be loaded while a kernel waits, so that all is run once by itself before.
    """
    layout = Layout(NUMELS, [torch.float32] * len(NUMELS), world_size)
    fault = torch.zeros((), dtype=torch.int32).pin_memory()
    memory = [torch.zeros(layout.size_bytes, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
    ranks = [Pulling(memory, layout, rank, 20.0, fault) for rank in range(world_size)]
    streams = [torch.cuda.Stream() for _ in ranks]
    alone = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    alone[:512].view(torch.int64).fill_(1 << 32)  # all others have been everywhere
    Pulling([alone] * world_size, Layout([64], [torch.float32], world_size), 0, 20.0, fault).begin(0).wait()
    parts = {
        (call, rank): noise(numel, torch.float32, 100 * call + rank) for rank in range(world_size) for call, numel in enumerate(NUMELS * 5)
    }
    torch.zeros(3, device="cuda").copy_(torch.ones(3, device="cuda")).add_(1).mul_(2)
    found: dict[tuple[int, int], torch.Tensor] = {key: torch.empty_like(part) for key, part in parts.items()}
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    for call in range(len(NUMELS) * 5):
        for rank, (pulling, stream) in enumerate(zip(ranks, streams, strict=True)):
            with torch.cuda.stream(stream):
                late(rank, call)
                tensor = pulling.tensors[call % len(NUMELS)]
                tensor.copy_(parts[call, rank])
                pulling.begin(call % len(NUMELS)).wait()
                found[call, rank].copy_(tensor)
                tensor.mul_(2)  # its owner changes it at once
    torch.cuda.synchronize()
    assert int(fault) == 0
    for call in range(len(NUMELS) * 5):
        expected = tree_sum([parts[call, rank].clone() for rank in range(world_size)])
        for rank in range(world_size):
            assert torch.equal(found[call, rank], expected), (call, rank)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("dtype", sorted(PULLED_DTYPES, key=str))
def test_the_kernel_adds_up_and_divides_as_its_oracle(world_size: int, dtype: torch.dtype) -> None:
    """One rank's part of sums of that many; the others' numbers lie on the same GPU."""
    layout = Layout(NUMELS, [dtype] * len(NUMELS), world_size)
    memory = [torch.zeros(layout.size_bytes, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
    rank = world_size - 2
    ranks = [Pulling(memory, layout, peer, 20.0, torch.zeros((), dtype=torch.int32).pin_memory()) for peer in range(world_size)]
    divisor = torch.tensor(257.0, dtype=torch.float64, device="cuda")
    for index, numel in enumerate(NUMELS):
        found = []
        for add in (Pulling.add_parts, Pulling._add_up):
            for peer, share in enumerate(ranks):
                share.tensors[index].copy_(noise(numel, dtype, 10 * index + peer))
            ranks[rank].fetch_parts(index)
            add(ranks[rank], index, divisor)
            found.append(ranks[rank].tensors[index].clone())
        assert torch.equal(*found), numel
        assert torch.equal(found[0], noise(numel, dtype, 10 * index + rank)) == (ranks[rank]._addends[index][rank].numel() == 0)


@needs_two_gpus
@run_ranks(*SEVERAL, backend="nccl", timeout_s=120)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("weight", [None, 257.0])
def test_tensors_are_summed_as_the_tree_does(captured: bool, weight: float | None) -> None:
    here = session()
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    pulling = pulling_for(NUMELS, dtypes)
    assert pulling is not None
    given = [torch.zeros(numel, dtype=dtype, device=here.device) for numel, dtype in zip(NUMELS, dtypes, strict=True)]
    taken = [torch.zeros_like(part) for part in given]
    total = torch.zeros((), dtype=torch.float64, device=here.device)

    def step() -> None:
        late(here.rank, 1)
        total.fill_(weight or 1.0)  # after a while
        known = None if weight is None else Divisor(total, torch.cuda.current_stream().record_event())
        works = []
        for index, part in enumerate(given):
            pulling.tensors[index].copy_(part)
            works.append(pull_sum(pulling, index, known))
        for index, work in enumerate(works):
            work.wait()
            taken[index].copy_(pulling.tensors[index])
            pulling.tensors[index].zero_()
        total.zero_()

    step()
    run = step
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for round_ in range(20):
        parts = [
            [noise(part.numel(), part.dtype, 1000 * round_ + 10 * index + rank) for rank in range(here.world_size)]
            for index, part in enumerate(given)
        ]
        for index, part in enumerate(given):
            part.copy_(parts[index][here.rank])
        late(here.rank, round_)
        run()
        for index, found in enumerate(taken):
            summed = tree_sum(parts[index])
            if weight is not None:  # not by a number of Python's, with whose inverse torch multiplies
                wide = summed if summed.dtype is torch.float64 else summed.float()
                summed = (wide / torch.full((), weight, dtype=torch.float64, device=here.device)).to(found.dtype)
            assert torch.equal(found, summed), (round_, index)
    if captured:
        graph.reset()


@needs_two_gpus
@run_ranks(*SEVERAL, backend="nccl", timeout_s=120)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": True, "num_micro": 1},
        {"precision": "bfloat16", "clip_norm": None},
        {"precision": "float16", "clip_norm": None},
        {"clip_norm": None, "bucket_cap_bytes": 64},
    ],
)
def test_training_steps_have_the_bits_of_eager_ones_and_of_plain_sums(optimizer: str, options: dict[str, object]) -> None:
    _, numbers, state = train("auto", 12, optimizer=optimizer, **options)
    with wanted(), mock.patch.object(sums, "_LEAST_PULLED_BYTES", 0):
        pulled, again, same = train("auto", 12, optimizer=optimizer, **options)
        _, eager, alike = train(False, 12, optimizer=optimizer, **options)
    assert again == eager
    assert all(torch.equal(*pair) for pair in zip(same, alike, strict=True))
    native = pulled.optimizer.synchronizer._native_sums
    assert (native.pulls, pulled.num_replayed) == (True, 9)
    assert (native._divisor is None) == (options.get("precision") == "float16"), "a loss scale comes after"
    if hora.world_size() == 2:
        assert numbers == again
        assert all(torch.equal(*pair) for pair in zip(state, same, strict=True))
    else:  # NCCL adds up in an order of its own
        for one, other in zip(state, same, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@needs_two_gpus
@run_ranks(*SEVERAL, backend="nccl", timeout_s=120)
def test_steps_that_cannot_be_captured_are_summed_by_nccl_again() -> None:
    def stubborn(model, batch, state):
        loss = model(batch).square().sum()
        return loss, float(loss.detach() * 0) + len(batch), {}, state  # which waits for the device

    weights = []
    for least in (0, 2**60):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).cuda()
        with wanted(), mock.patch.object(sums, "_LEAST_PULLED_BYTES", least):
            step = hora.TrainStep(model, stubborn, torch.optim.SGD(model.parameters(), 0.01))
        pulled = step.optimizer.synchronizer._native_sums.pulls
        assert pulled == (least == 0)
        for number in range(8):
            step([noise(32, torch.float32, 10 * number + hora.rank()).view(4, 8) / 1000])
        assert (step.num_replayed, step.optimizer.synchronizer._native_sums.pulls) == (0, False)
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(*weights)


@needs_two_gpus
@run_ranks(*SEVERAL, backend="nccl", timeout_s=120)
@pytest.mark.parametrize("fault", ["copies", "variable"])
def test_one_rank_that_cannot_pull_leaves_the_sums_of_all_to_nccl(fault: str) -> None:
    here = session()
    broken = here.rank == 1
    copies = mock.patch.object(Pulling, "gather_parts") if broken and fault == "copies" else nullcontext()
    variable = mock.patch.dict(os.environ, {env.COPY_ENGINES: "0"} if broken and fault == "variable" else {})
    with copies, variable:
        assert pulling_for(NUMELS, [torch.float32] * len(NUMELS)) is None
    assert pulling_for(NUMELS, [torch.float32] * len(NUMELS)) is not None


def body_without_the_other() -> None:
    pulling = pulling_for([1000], [torch.float32])
    pull_sum(pulling, 0).wait()
    torch.cuda.synchronize()
    if hora.rank() == 1:
        time.sleep(12.0)
    try:
        pull_sum(pulling, 0).wait()
        pulling.tensors[0].sum().item()
    finally:
        hora.shutdown()


@needs_two_gpus
@pytest.mark.gpu
def test_a_sum_does_not_wait_longer_than_the_deadline_and_says_for_whom(spawn_ranks):
    end_without_rank_1(spawn_ranks, body_without_the_other)
