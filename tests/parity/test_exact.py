"""Exact mode: the same bits on 1, 2, 3 and 4 ranks."""

import hashlib
import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hora
from hora.errors import CheckpointMismatch, CollectiveMismatch, ConfigError
from hora.plan.logical import LogicalRanks
from hora.sync.ordered import is_tree_over_ranks
from hora.train.checkpoint import origin
from hora.train.checkpoint.checkpointer import Checkpointer


class Augmented(torch.utils.data.Dataset):
    """Samples with noise drawn from the global generators, as augmentation does."""

    def __init__(self, num_samples: int, shape: tuple[int, ...]):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, *shape, generator=generator)
        self.targets = torch.randint(3, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        return self.inputs[index] + 0.1 * torch.randn(self.inputs[index].shape) * random.random(), self.targets[index]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 33), nn.Dropout(0.3), nn.ReLU(), nn.Linear(33, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(5, 4, 2), nn.BatchNorm2d(4, momentum=None), nn.Flatten(),
        nn.Linear(36, 3),
    )  # fmt: skip


MODELS = {"perceptron": (perceptron, (6,)), "convolutional": (convolutional, (2, 6, 6))}


def digest(tensors) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train(
    kind: str, *, strategy: str = "overlap", steps: int = 12, micro_batch_size: int | None = 2, bucket_cap_bytes: int = 300, state=None
):
    """Digests after each step, and the state at the end."""
    make, shape = MODELS[kind]
    torch.manual_seed(hora.rank())  # ranks begin differently, as sloppy scripts do: rank 0's weights count
    if hora.rank() == 0:
        torch.manual_seed(11)
    model = make().to(hora.device())
    optimizer = hora.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), 1e-2), model, strategy=strategy, bucket_cap_bytes=bucket_cap_bytes, clip_norm=1.0
    )
    loader = hora.DataLoader(Augmented(90, shape), global_batch_size=22, micro_batch_size=micro_batch_size, seed=5)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    digests = []
    while len(digests) < steps:
        for step in loader:
            for inputs, targets in optimizer.micro_batches(step):
                inputs, targets = inputs.to(hora.device()), targets.to(hora.device())
                loss = F.cross_entropy(model(inputs), targets, reduction="sum")
                optimizer.backward(loss, weight=0.1 * len(targets))
            optimizer.step()
            gradients = [parameter.grad for parameter in model.parameters()]
            moments = [value for entry in optimizer.state.values() for value in entry.values()]
            digests.append(digest([*model.state_dict().values(), *gradients, *moments, optimizer.last_grad_norm]))
            if len(digests) == steps:
                break
    return digests, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}


def body(kind: str, **how):
    digests, _ = train(kind, **how)
    everybody = hora.all_gather_object(digests)
    assert all(other == digests for other in everybody), "ranks differ"
    return digests


def bits(rank_pools, world_size: int, device: str = "cpu", **arguments) -> list[str]:
    """What the body returns on `world_size` ranks in exact mode."""
    how = {"backend": None, "device": device, "exact": True}
    outcomes = rank_pools.run(body, arguments, world_size=world_size, how=how, timeout_s=60.0)
    assert all(outcome.clean for outcome in outcomes), outcomes
    return outcomes[0].result


def train_in_part():
    """Gradients of a model of which a part is used on some logical ranks only, not the first."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    inputs = torch.arange(24.0).view(8, 3)
    found = []
    for step in hora.DataLoader(torch.utils.data.TensorDataset(inputs), global_batch_size=8, micro_batch_size=1, shuffle=False):
        for (rows,) in optimizer.micro_batches(step):
            hidden = model[0](rows)
            optimizer.backward((model[1](hidden) if rows[0, 0] in (6, 9, 18) else hidden).sum(), weight=1)
        found = [parameter.grad.flatten().tolist() for parameter in model.parameters()]
    return found


def test_a_part_that_the_first_logical_rank_does_not_use_has_its_gradient(rank_pools):
    how = {"backend": None, "device": "cpu", "exact": True}
    outcomes = [rank_pools.run(train_in_part, {}, world_size=size, how=how, timeout_s=60.0) for size in (1, 2, 3)]
    assert all(outcome.clean for ranks in outcomes for outcome in ranks), outcomes
    assert [ranks[0].result for ranks in outcomes] == [outcomes[0][0].result] * 3
    assert outcomes[0][0].result[3] == [3 / 8] * 3


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_any_number_of_ranks_gives_the_same_bits(rank_pools, kind, micro_batch_size):
    alone = bits(rank_pools, 1, kind=kind, micro_batch_size=micro_batch_size)
    assert len(set(alone)) == len(alone)
    for world_size in (2, 3, 4):
        assert bits(rank_pools, world_size, kind=kind, micro_batch_size=micro_batch_size) == alone, world_size


@pytest.mark.parametrize("kind", MODELS)
def test_strategies_and_buckets_do_not_change_the_bits(rank_pools, kind):
    expected = bits(rank_pools, 3, kind=kind, strategy="deferred", bucket_cap_bytes=2**20)
    assert bits(rank_pools, 3, kind=kind, strategy="overlap", bucket_cap_bytes=100) == expected


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_cannot_be_exact_is_refused_with_the_reason(rank_pools, world_size):
    how = {"backend": None, "device": "cpu", "exact": True}
    outcomes = rank_pools.run(body_refused, {}, world_size=world_size, how=how, timeout_s=60.0)
    assert all(outcome.clean for outcome in outcomes), outcomes


def optimizer_of(model: nn.Module, **how) -> hora.DistributedOptimizer:
    return hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, **how)


class Counter(nn.Module):
    """Has a buffer that forward changes and that is no running statistic."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        return self.linear(inputs)


def body_refused():
    model = nn.Linear(6, 3)
    optimizer = optimizer_of(model)
    with pytest.raises(ConfigError, match="a plain loss.backward.. does not say which logical rank"):
        model(torch.ones(2, 6)).sum().backward()
    model.zero_grad()
    with pytest.raises(ConfigError, match="takes a step of hora.DataLoader .* but got list instead"):
        list(optimizer.micro_batches([torch.ones(2, 6)]))
    with pytest.raises(ConfigError, match="the loop must be"):
        optimizer.backward(model(torch.ones(2, 6)).sum(), weight=1)
    with pytest.raises(ConfigError, match="norm is a SyncBatchNorm"):
        optimizer_of(nn.ModuleDict({"norm": hora.SyncBatchNorm(3)}))
    with pytest.raises(ConfigError, match="sparse=False"):
        optimizer_of(nn.Embedding(5, 3, sparse=True))
    step = next(iter(hora.DataLoader(Augmented(40, (6,)), global_batch_size=20)))
    counter = Counter()
    optimizer = optimizer_of(counter)
    with pytest.raises(ConfigError, match="forward has changed the buffer 'calls'"):
        for inputs, targets in optimizer.micro_batches(step):
            optimizer.backward(F.cross_entropy(counter(inputs), targets, reduction="sum"), weight=len(targets))


def test_random_numbers_between_steps_are_the_same_and_two_loops_over_a_step_are_possible(rank_pools):
    how = {"backend": None, "device": "cpu", "exact": True}
    found = [rank_pools.run(body_two_loops, {}, world_size=n, how=how, timeout_s=60.0)[0].result for n in (1, 2, 3)]
    assert found[0] is not None
    assert found[1:] == found[:1] * 2


def body_two_loops():
    torch.manual_seed(1)
    first, second = perceptron(), perceptron()
    one, two = optimizer_of(first), optimizer_of(second)
    drawn = []
    for step in hora.DataLoader(Augmented(40, (6,)), global_batch_size=16, micro_batch_size=1):
        held = step.hold()
        for optimizer, model in ((one, first), (two, second)):
            for inputs, targets in optimizer.micro_batches(held):
                optimizer.backward(F.cross_entropy(model(inputs), targets, reduction="sum"), weight=len(targets))
            optimizer.step()
        drawn.append([torch.rand(()).item(), random.random()])
    return [drawn, digest([*first.state_dict().values(), *second.state_dict().values()])]


def test_session_is_put_back_as_it_was(spawn_ranks):
    (outcome,) = spawn_ranks(1, body_put_back, join=False, environ={"HORA_EXACT": "4"}).wait(60.0)
    assert outcome.kind == "passed", outcome


def body_put_back():
    def switches():
        filled = torch.utils.deterministic.fill_uninitialized_memory
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.get_num_threads(), filled

    torch.set_num_threads(2)
    torch.backends.cudnn.benchmark = True
    before = switches()
    assert hora.init().exact == hora.Exact(logical_ranks=4)
    assert switches() == (True, False, 1, False)
    hora.shutdown()
    assert switches() == before
    assert hora.init(exact=False).exact is None
    hora.shutdown()
    with pytest.raises(ConfigError, match="logical_ranks must be at least 1"):
        hora.Exact(logical_ranks=0)
    with pytest.raises(ConfigError, match="HORA_EXACT must be the number of logical ranks, but is 'yes'"):
        hora.Exact.choose(None, {"HORA_EXACT": "yes"})


def test_ranks_that_disagree_on_exact_mode_are_told(spawn_ranks, tmp_path):
    method = f"file://{tmp_path / 'store'}"
    ranks = [spawn_ranks(1, body_disagrees, join=False, environ={"NUMBER": str(n)}, method=method) for n in range(2)]
    for rank in ranks:
        assert "exact is" in rank.wait(60.0)[0].result


def body_disagrees(method: str):
    number = int(os.environ["NUMBER"])
    with pytest.raises(CollectiveMismatch) as error:
        hora.init(init_method=method, rank=number, world_size=2, exact=number == 1, timeout_s=30.0)
    return str(error.value)


def test_checkpoint_of_an_exact_run_is_not_taken_for_that_of_another(spawn_ranks, tmp_path):
    for exact, printed in ((3, ""), (3, ""), (2, ""), (0, "training goes on outside it")):
        ranks = spawn_ranks(1, body_restores, join=False, path=tmp_path, logical_ranks=exact)
        (outcome,) = ranks.wait(60.0)
        assert outcome.kind == "passed", outcome
        assert printed in outcome.printed


def test_exact_checkpoint_from_another_machine_is_warned_of(spawn_ranks, tmp_path):
    for device, printed in (("NVIDIA H100", ""), ("NVIDIA A100", "the checkpoint was written with NVIDIA H100 and this is NVIDIA A100")):
        (outcome,) = spawn_ranks(1, body_restores_on, join=False, path=tmp_path, device=device).wait(60.0)
        assert outcome.kind == "passed", outcome
        assert (printed in outcome.printed) if printed else "written with" not in outcome.printed


def body_restores_on(path, device: str):
    origin.processor_name = lambda: device
    body_restores(path, 3)


def body_restores(path, logical_ranks: int):
    hora.init(exact=hora.Exact(logical_ranks) if logical_ranks else False)
    kept = Checkpointer(path / "checkpoints")
    if not (path / "checkpoints").exists():
        kept.prepare()
        kept.save({"thing": {"a": 1}}, step=1, epoch=0)
    if logical_ranks == 2:
        with pytest.raises(CheckpointMismatch, match=r"give it exact=hora.Exact\(logical_ranks=3, seed=0, num_threads=1\)"):
            kept.load()
    else:
        assert kept.load().state["thing"] == {"a": 1}
    hora.shutdown()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_update_is_that_of_one_process_on_the_global_batch(rank_pools, world_size):
    how = {"backend": None, "device": "cpu", "exact": True}
    outcomes = rank_pools.run(body_beside_plain, {}, world_size=world_size, how=how, timeout_s=60.0)
    assert all(outcome.clean for outcome in outcomes), outcomes


def body_beside_plain():
    torch.manual_seed(2)
    dataset = torch.utils.data.TensorDataset(torch.randn(90, 6, dtype=torch.float64), torch.randint(3, (90,)))
    ours, plain = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    optimizer = optimizer_of(ours)
    plain.load_state_dict(ours.state_dict())
    update = torch.optim.SGD(plain.parameters(), 0.1)
    whole = hora.DataLoader(dataset, global_batch_size=22, rank=0, world_size=1, logical_ranks=1)
    for step, ((inputs, targets),) in zip(hora.DataLoader(dataset, global_batch_size=22, micro_batch_size=2), whole, strict=True):
        for part, labels in optimizer.micro_batches(step):
            optimizer.backward(F.cross_entropy(ours(part), labels, reduction="sum"), weight=len(labels))
        update.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)
        optimizer.step()
        update.step()
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 3])
def test_running_statistics_are_the_weighted_mean_of_the_logical_ranks(rank_pools, world_size):
    how = {"backend": None, "device": "cpu", "exact": True}
    outcomes = rank_pools.run(body_statistics, {}, world_size=world_size, how=how, timeout_s=60.0)
    assert all(outcome.clean for outcome in outcomes), outcomes


def body_statistics():
    dataset = torch.utils.data.TensorDataset(torch.randn(21, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    ours, expected = nn.BatchNorm1d(4).double(), []
    for (part,) in next(iter(hora.DataLoader(dataset, global_batch_size=21, rank=0, world_size=1, logical_ranks=8))):
        alone = nn.BatchNorm1d(4).double()
        alone(part)
        expected.append((len(part), alone.running_mean, alone.running_var))
    optimizer = optimizer_of(ours)
    for (part,) in optimizer.micro_batches(next(iter(hora.DataLoader(dataset, global_batch_size=21)))):
        optimizer.backward(ours(part).sum(), weight=len(part))
    assert [weight for weight, _, _ in expected] == [3, 3, 3, 3, 3, 2, 2, 2]
    for found, place in ((ours.running_mean, 1), (ours.running_var, 2)):
        torch.testing.assert_close(found, sum(entry[0] * entry[place] for entry in expected) / 21, rtol=1e-12, atol=1e-12)
    assert ours.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("leaves", "ranks", "same"),
    [
        (8, 2, True),
        (8, 4, True),
        (8, 8, True),
        (7, 4, True),
        (6, 3, True),
        (5, 3, True),
        (3, 2, True),
        (8, 3, False),
        (6, 2, False),
        (4, 3, False),
    ],
)
def test_one_sum_a_rank_is_added_as_ranks_are_only_where_the_trees_are_alike(leaves, ranks, same):
    logical = LogicalRanks(leaves, ranks)
    assert is_tree_over_ranks(logical, [logical.subtrees(rank) for rank in range(ranks)]) == same
