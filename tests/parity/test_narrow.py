"""Gradients that travel as bfloat16 or float16: rounded twice and no more, the same on all ranks, and never too large unseen."""

import copy

import pytest
import torch
from test_gradients import TINY_BUCKETS, batch, loss_sum, mlp, one_step, values
from torch import nn

import hora
from hora import events
from hora.errors import CollectiveMismatch, ConfigError, NonFiniteGradient
from hora.testing import run_ranks
from hora.testing.reference import train

TYPES = {"bfloat16": (torch.bfloat16, 2**-8), "float16": (torch.float16, 2**-11)}


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("wire", TYPES)
@pytest.mark.parametrize("strategy", ["overlap", "deferred"])
def test_gradients_have_the_bits_of_the_all_reduce_that_rounds(world_size, wire, strategy):
    wire_dtype, _ = TYPES[wire]
    model = mlp(torch.float32)
    alone = copy.deepcopy(model)
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy, bucket_cap_bytes=TINY_BUCKETS, wire_dtype=wire_dtype
    )
    inputs, targets = batch(4, hora.rank(), torch.float32)
    for _ in optimizer.micro_batches([None]):
        optimizer.backward(loss_sum(model, inputs, targets), weight=4)
    loss_sum(alone, inputs, targets).backward()
    total = torch.tensor(4.0 * world_size, dtype=torch.float64, device=hora.device())
    for mine, parameter in zip(model.parameters(), alone.parameters(), strict=True):
        if hora.device().type == "cpu":  # divided before it travels
            expected = hora.all_reduce(parameter.grad / total, wire_dtype=wire_dtype)
        else:
            expected = hora.all_reduce(parameter.grad, wire_dtype=wire_dtype) / total.float()
        assert torch.equal(mine.grad, expected)


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("wire", TYPES)
@pytest.mark.parametrize("strategy", ["overlap", "sharded"])
def test_updates_are_those_of_one_process_but_for_the_rounding(world_size, wire, strategy):
    wire_dtype, step = TYPES[wire]
    model = mlp()
    alone = copy.deepcopy(model)
    steps = [batch(9, seed) for seed in range(6)]
    train(alone, torch.optim.SGD(alone.parameters(), 0.3), steps, loss_sum, clip_norm=0.5)
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.3),
        model,
        strategy=strategy,
        bucket_cap_bytes=TINY_BUCKETS,
        clip_norm=0.5,
        wire_dtype=wire_dtype,
    )
    for tensors in steps:
        one_step(model, optimizer, tensors, 2)
        optimizer.step()
    for mine, theirs in zip(values(model).values(), values(alone).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=6 * 0.3 * 0.5 * 4 * step if world_size > 1 else 1e-9)
        everybody = hora.all_gather(mine.to(hora.device())[None])
        assert all(torch.equal(part, everybody[0]) for part in everybody)


class Bytes(events.Observer):
    """Counts what a step sends."""

    def __init__(self):
        self.sent = {}

    def on_collective(self, *, kind, sequence, size_bytes, phase):
        if phase == "begin":
            self.sent[kind] = self.sent.get(kind, 0) + size_bytes


@run_ranks(2)
def test_half_the_bytes_travel(world_size):
    model = nn.Linear(64, 63, bias=False).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, wire_dtype=torch.bfloat16)
    with events.observe(Bytes()) as seen:
        for _ in optimizer.micro_batches([None]):
            optimizer.backward(model(torch.ones(2, 64, device=hora.device())).sum(), weight=2)
    padded = 64 * 63 + 32  # with the lane that says whether there is a gradient, up to whole chunks
    assert seen.sent["all_to_all"] == 2 * padded
    assert seen.sent["all_gather"] == 2 * padded // world_size
    assert "all_reduce" not in seen.sent


@run_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["overlap", "sharded"])
def test_parameters_without_a_gradient_anywhere_are_left_alone(world_size, strategy):
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)]).to(hora.device())
    before = copy.deepcopy(model)
    optimizer = hora.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5), model, strategy=strategy, wire_dtype=torch.bfloat16
    )
    used = model[0] if hora.rank() == 0 else model[1]  # the third nowhere
    for _ in optimizer.micro_batches([None]):
        optimizer.backward(used(torch.ones(2, 3, device=hora.device())).sum(), weight=2)
    optimizer.step()
    assert not torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[1].weight, before[1].weight)
    assert torch.equal(model[2].weight, before[2].weight)


@run_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["overlap", "sharded"])
def test_what_is_too_large_for_the_type_on_one_rank_is_applied_on_none(world_size, strategy):
    model = nn.Linear(3, 1, bias=False).to(hora.device())
    before = model.weight.clone()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy, wire_dtype=torch.float16)
    inputs = torch.full((2, 3), 1e9 if hora.rank() == world_size - 1 else 1.0, device=hora.device())
    with pytest.raises(NonFiniteGradient):
        for _ in optimizer.micro_batches([None]):
            optimizer.backward(model(inputs).sum(), weight=2)
        optimizer.step()
        optimizer.settle_checks()
    assert torch.equal(model.weight, before)


@run_ranks(2)
def test_gradients_that_are_as_narrow_travel_as_they_are(world_size):
    models = [nn.Linear(4, 3).to(hora.device(), torch.bfloat16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for model, wire_dtype in zip(models, (torch.bfloat16, None), strict=True):
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, wire_dtype=wire_dtype)
        for _ in optimizer.micro_batches([None]):
            optimizer.backward(model(torch.full((2, 4), 1.0 + hora.rank(), device=hora.device(), dtype=torch.bfloat16)).sum(), weight=2)
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@run_ranks(2)
def test_mistakes_are_refused(world_size):
    model = nn.Linear(2, 2).to(hora.device())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"wire_dtype must be None or one of torch.bfloat16, torch.float16, but is torch.int8 instead"):
        hora.DistributedOptimizer(optimizer, model, wire_dtype=torch.int8)
    with pytest.raises(CollectiveMismatch, match="wire_dtype"):
        hora.DistributedOptimizer(optimizer, model, wire_dtype=torch.bfloat16 if hora.rank() else None)


def body_exact() -> str:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="exact mode has the same bits on any number of them; leave one out") as caught:
        hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, wire_dtype=torch.bfloat16)
    return str(caught.value)


def test_exact_mode_refuses_it(spawn_ranks):
    outcomes = spawn_ranks(1, body_exact, init={"exact": True}).wait()
    assert [outcome.kind for outcome in outcomes] == ["passed"], outcomes


@run_ranks(2)
def test_the_loss_scale_finds_what_float16_can_say(world_size):
    model = nn.Linear(3, 1, bias=False).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-6), model, wire_dtype=torch.float16)

    def loss_fn(model, inputs, state):
        return model(inputs).sum(), len(inputs), {}, state

    step = hora.TrainStep(model, loss_fn, optimizer, precision="float16")
    for _ in range(12):
        step([torch.full((4, 3), 100.0)])
    optimizer.settle_checks()
    assert optimizer.skipped_steps > 0
    assert optimizer.skipped_steps < 12
    assert model.weight.isfinite().all()
