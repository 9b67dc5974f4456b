"""Gradients and updates on any number of ranks equal those of one process that has the whole global batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hora
from hora.testing import run_ranks
from hora.testing.reference import assert_same, global_gradients, train

STRATEGIES = ["deferred", "overlap"]
TINY_BUCKETS = 256  # bytes: several buckets even for the models here


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3)).to(hora.device(), dtype)


def loss_sum(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), targets, reduction="sum")


def batch(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(size, 7, generator=generator, dtype=dtype), torch.randint(3, (size,), generator=generator)
    return inputs.to(hora.device()), targets.to(hora.device())


def share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.tensor_split(hora.world_size())[hora.rank()]


def micro(tensors: tuple[torch.Tensor, torch.Tensor], size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    mine = [share(tensor) for tensor in tensors]
    return list(zip(*(tensor.split(size) for tensor in mine), strict=True)) if len(mine[0]) else []


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def values(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def one_step(model: nn.Module, optimizer: hora.DistributedOptimizer, tensors: tuple[torch.Tensor, torch.Tensor], size: int) -> None:
    for inputs, targets in optimizer.micro_batches(micro(tensors, size)):
        optimizer.backward(loss_sum(model, inputs, targets), weight=len(inputs))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("micro_batch_size", [1, 3, 100])
@run_ranks(1, 2, 3, 4)
def test_gradient_is_that_of_the_global_batch(strategy: str, micro_batch_size: int) -> None:
    model = mlp()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy, bucket_cap_bytes=TINY_BUCKETS)
    for seed, size in enumerate([13, 8, 2, 1]):  # 2 and 1: some ranks have no sample
        tensors = batch(size, seed)
        one_step(model, optimizer, tensors, micro_batch_size)
        assert_same(gradients(model), global_gradients(model, *tensors, loss_sum), 1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@run_ranks(1, 2, 3, 4)
def test_twenty_updates_equal_one_process(strategy: str, kind: str) -> None:
    make = {"sgd": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 0.01)}[kind]
    model = mlp()
    alone = copy.deepcopy(model)
    steps = [batch(9, seed) for seed in range(20)]
    train(alone, make(alone.parameters()), steps, loss_sum, clip_norm=0.5)
    optimizer = hora.DistributedOptimizer(make(model.parameters()), model, strategy=strategy, bucket_cap_bytes=TINY_BUCKETS, clip_norm=0.5)
    for tensors in steps:
        one_step(model, optimizer, tensors, 2)
        optimizer.step()
    assert_same(values(model), values(alone), 1e-9)


@run_ranks(1, 2, 3, 4)
def test_float32_updates_equal_one_process_to_rounding() -> None:
    model = mlp(torch.float32)
    alone = copy.deepcopy(model)
    steps = [batch(12, seed, torch.float32) for seed in range(20)]
    train(alone, torch.optim.SGD(alone.parameters(), 0.1), steps, loss_sum)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for tensors in steps:
        one_step(model, optimizer, tensors, 2)
        optimizer.step()
    assert_same(values(model), values(alone), 1e-5)


@run_ranks(1, 2, 3)
def test_weights_of_tokens_count_across_ranks_and_micro_batches() -> None:
    """Each sample weighs differently, as sentences of different lengths do."""
    model = mlp()
    inputs, targets = batch(10)
    lengths = torch.arange(1, 11, dtype=torch.float64, device=hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    mine = list(zip(*(share(t).split(2) for t in (inputs, targets, lengths)), strict=True))
    for x, y, n in optimizer.micro_batches(mine):
        optimizer.backward((F.cross_entropy(model(x), y, reduction="none") * n).sum(), weight=n.sum())
    expected = torch.autograd.grad(
        (F.cross_entropy(model(inputs), targets, reduction="none") * lengths).sum() / lengths.sum(), list(model.parameters())
    )
    assert_same(gradients(model), dict(zip(gradients(model), expected, strict=True)), 1e-9)


@run_ranks(1, 2, 4)
def test_a_weight_beyond_the_gradients_precision_is_exact() -> None:
    """bfloat16 cannot say 257 (it would be 256, and the gradient 1): the weight must not travel in the gradients' type."""
    model = nn.Linear(1, 1, bias=False).to(hora.device(), torch.bfloat16)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in optimizer.micro_batches([None]):
        optimizer.backward(model.weight.sum() * 256, weight=257)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == torch.tensor(256 / 257).to(torch.bfloat16).item() < 1.0


@run_ranks(1, 2)
@pytest.mark.parametrize(("first", "dtype"), [(2**24 + 1, "int64"), (256, "bfloat16")])
def test_weights_in_tensors_of_any_type_add_up_exactly(first: int, dtype: str) -> None:
    model = nn.Linear(1, 1, bias=False).to(hora.device(), torch.float64)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for weight in optimizer.micro_batches([first, 1]):
        optimizer.backward(model.weight.sum() * weight, weight=torch.tensor(weight, dtype=getattr(torch, dtype), device=hora.device()))
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 1.0


@run_ranks(1, 2, 3)
def test_a_global_batch_without_weight_gives_zero_gradients() -> None:
    model = mlp()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    inputs, targets = batch(2)
    for _ in optimizer.micro_batches([0]):
        optimizer.backward(loss_sum(model, inputs, targets) * 0, weight=0)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


class Branches(nn.Module):
    """Rank r uses branch r; `never` is used by nobody, `frozen` is not trained, `tied` shares a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(7, 4, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(4, 3, dtype=torch.float64) for _ in range(4))
        self.never = nn.Linear(4, 3, dtype=torch.float64)
        self.frozen = nn.Linear(7, 7, dtype=torch.float64).requires_grad_(False)
        self.tied = nn.Linear(7, 4, bias=False, dtype=torch.float64)
        self.tied.weight = self.trunk.weight

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(self.frozen(inputs)) + self.tied(inputs))
        return self.branches[branch](hidden)


@pytest.mark.parametrize("strategy", STRATEGIES)
@run_ranks(1, 2, 3, 4)
def test_unused_frozen_and_tied_parameters_are_as_in_one_process(strategy: str) -> None:
    """A parameter nobody uses keeps grad None, so that AdamW's decay leaves it alone; one that some ranks use is summed."""
    model = Branches().to(hora.device())
    alone = copy.deepcopy(model)
    world_size, inputs, targets = hora.world_size(), *batch(8)
    optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.1), model, strategy=strategy, bucket_cap_bytes=64)
    plain = torch.optim.AdamW(alone.parameters(), 0.1)
    for _ in range(3):
        for x, y in optimizer.micro_batches(micro((inputs, targets), 100)):
            optimizer.backward(F.cross_entropy(model(x, hora.rank()), y, reduction="sum"), weight=len(x))
        plain.zero_grad()
        parts = zip(inputs.tensor_split(world_size), targets.tensor_split(world_size), strict=True)
        total = sum(F.cross_entropy(alone(x, rank), y, reduction="sum") for rank, (x, y) in enumerate(parts))
        (total / len(inputs)).backward()
        assert_same(gradients(model), gradients(alone), 1e-9)
        optimizer.step()
        plain.step()
    assert model.never.weight.grad is None
    assert_same(values(model), values(alone), 1e-9)


@run_ranks(1, 2, 3, 4)
def test_sparse_embeddings_are_as_in_one_process() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.table = nn.Embedding(50, 4, sparse=True, dtype=torch.float64)
            self.out = nn.Linear(4, 3, dtype=torch.float64)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(words))

    model = Bag().to(hora.device())
    alone = copy.deepcopy(model)
    words, targets = torch.randint(50, (9,), generator=torch.Generator().manual_seed(2)).to(hora.device()), batch(9)[1]
    table = hora.DistributedOptimizer(torch.optim.SparseAdam(model.table.parameters(), 0.1), model)
    rest = hora.DistributedOptimizer(torch.optim.Adam(model.out.parameters(), 0.1), model)
    plain = [torch.optim.SparseAdam(alone.table.parameters(), 0.1), torch.optim.Adam(alone.out.parameters(), 0.1)]
    for _ in range(4):
        for x, y in table.micro_batches(micro((words, targets), 2)):
            table.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(x))
        for optimizer in plain:
            optimizer.zero_grad()
        (F.cross_entropy(alone(words), targets, reduction="sum") / len(words)).backward()
        assert model.table.weight.grad is not None
        assert model.table.weight.grad.is_sparse
        assert_same(gradients(model), gradients(alone), 1e-9)
        with torch.sparse.check_sparse_tensor_invariants():  # SparseAdam's own sparse tensors warn on a GPU when nobody says
            for optimizer in [table, rest, *plain]:
                optimizer.step()
    assert_same(values(model), values(alone), 1e-9)


@run_ranks(1, 2, 3)
def test_channels_last_and_mixed_types_are_as_in_one_process() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.conv = nn.Conv2d(3, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float32))
            self.out = nn.Linear(4, 3, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.conv(x).mean((2, 3)) * self.scale.double())

    model = Mixed().to(hora.device())
    images = torch.randn(7, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    images, targets = images.to(hora.device(), memory_format=torch.channels_last), batch(7)[1]
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    one_step(model, optimizer, (images, targets), 2)
    expected = global_gradients(model, images, targets, loss_sum)
    scale = {"scale": expected.pop("scale")}
    found = gradients(model)
    assert_same({"scale": found.pop("scale")}, scale, 1e-6)
    assert_same(found, expected, 1e-9)
    assert model.conv.weight.grad is not None
    assert model.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)


@run_ranks(1, 2, 3, 4)
def test_a_plain_loop_averages_as_distributed_data_parallel_does() -> None:
    model = mlp()
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, bucket_cap_bytes=TINY_BUCKETS)
    theirs = torch.optim.SGD(ddp.parameters(), 0.1)
    for seed in range(5):
        inputs, targets = batch(3, seed * 10 + hora.rank())
        for m, o in ((model, optimizer), (ddp, theirs)):
            o.zero_grad()
            F.cross_entropy(m(inputs), targets).backward()
        assert_same(gradients(model), gradients(ddp.module), 1e-9)
        optimizer.step()
        theirs.step()
    assert_same(values(model), values(ddp.module), 1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
@run_ranks(1, 2, 3)
def test_accumulated_plain_passes_add_up_and_a_partial_window_is_flushed(strategy: str) -> None:
    model = mlp()
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy, accumulation_steps=3, bucket_cap_bytes=TINY_BUCKETS
    )
    everyone = [[batch(2, 100 * rank + k) for k in range(3)] for rank in range(hora.world_size())]
    for passes in (3, 2):
        optimizer.zero_grad()
        for tensors in everyone[hora.rank()][:passes]:
            loss_sum(model, *tensors).backward()
        if passes < 3:
            before = copy.deepcopy(model)
        expected = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        for tensors in (t for rank in everyone for t in rank[:passes]):
            for name, gradient in global_gradients(model, *tensors, loss_sum).items():
                expected[name] += gradient * len(tensors[0]) / hora.world_size()
        if passes == 3:
            assert_same(gradients(model), expected, 1e-9)
        else:  # step() sums what an incomplete window has
            optimizer.step()
            moved = {name: (old - dict(model.named_parameters())[name]).detach() / 0.1 for name, old in before.named_parameters()}
            assert_same(moved, expected, 1e-9)
