"""Sums by copy engines: the bits of the tree, whoever is late, in CUDA graphs, and in training steps."""

import pytest
import torch
from gpu_ranks import UNSHARED
from test_peer_memory_on_gpus import noise, tree_sum

import hora
from hora.comm.flat import pull_sum
from hora.comm.peer_memory.pulling import Layout, Pulling
from hora.comm.session import session
from hora.testing import run_ranks

SEVERAL = [n for n in UNSHARED if n > 1]
NUMELS = (1, 100_003, 64, 3_000_000)


def late(rank: int, call: int) -> None:
    """Some ranks are late with some calls."""
    torch.cuda._sleep(300_000 * ((rank * 7 + call * 5) % 4))


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_are_late_get_what_the_others_get(world_size: int) -> None:
    """The ranks are streams of one GPU, whose queues are enough for three. Nothing can be loaded while a kernel waits, so that all is run once by itself before."""
    dtypes = [torch.float32] * len(NUMELS)
    layout = Layout(NUMELS, [4] * len(NUMELS), world_size)
    fault = torch.zeros((), dtype=torch.int32).pin_memory()
    memory = [torch.zeros(layout.size_bytes, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
    ranks = [Pulling(memory, layout, dtypes, rank, 20.0, fault) for rank in range(world_size)]
    streams = [torch.cuda.Stream() for _ in ranks]
    alone = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    alone[:48].view(torch.int64).fill_(1 << 32)  # all others have been everywhere
    Pulling([alone, alone], Layout([64], [4], 2), [torch.float32], 0, 20.0, fault).begin(0).wait()
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


@run_ranks(*SEVERAL, backend="nccl", timeout_s=120)
@pytest.mark.parametrize("captured", [False, True])
def test_tensors_are_summed_as_the_tree_does(captured: bool) -> None:
    here = session()
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    pulling = here.groups.pulling(here.device, NUMELS, dtypes)
    assert pulling is not None
    given = [torch.zeros(numel, dtype=dtype, device=here.device) for numel, dtype in zip(NUMELS, dtypes, strict=True)]
    taken = [torch.zeros_like(part) for part in given]

    def step() -> None:
        works = []
        for index, part in enumerate(given):
            pulling.tensors[index].copy_(part)
            works.append(pull_sum(pulling, index))
        for index, work in enumerate(works):
            work.wait()
            taken[index].copy_(pulling.tensors[index])
            pulling.tensors[index].zero_()

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
            assert torch.equal(found, tree_sum(parts[index])), (round_, index)
    if captured:
        graph.reset()


@run_ranks(*SEVERAL, backend="nccl", timeout_s=120)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_training_steps_have_the_numbers_of_plain_sums(clip_norm: float | None) -> None:
    def train(pulls: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64)).to(hora.device())
        optimizer = hora.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), 1e-2), model, bucket_cap_bytes=2**16, clip_norm=clip_norm
        )
        if not pulls:
            optimizer.synchronizer.pull_sums = lambda: None
        step = hora.TrainStep(model, lambda m, batch, state: (m(batch).square().sum(), len(batch), {}, state), optimizer)
        assert optimizer.synchronizer._turns.sums.pulls == pulls
        for number in range(12):
            step([noise(32 * 64, torch.float32, 10 * number + hora.rank()).view(32, 64) / 1000])
        assert step.num_replayed > 0
        return [parameter.detach().clone() for parameter in model.parameters()]

    for pulled, plain in zip(train(True), train(False), strict=True):
        if hora.world_size() == 2:
            assert torch.equal(pulled, plain)
        else:
            torch.testing.assert_close(pulled, plain)
