"""Strategy `sharded`: the updates of one process, with the state dealt out."""

import copy
import gc
import math
import warnings

import pytest
import torch
from test_gradients import TINY_BUCKETS, batch, loss_sum, mlp, one_step, values
from torch import nn

import hora
from hora.comm.torch_private import has_step_hooks
from hora.errors import ConfigError, NonFiniteGradient
from hora.testing import run_ranks
from hora.testing.reference import assert_same, train

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.3),
    "momentum": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
}


def sharded(model, optimizer, **settings):
    return hora.DistributedOptimizer(optimizer, model, strategy="sharded", bucket_cap_bytes=TINY_BUCKETS, **settings)


def state_of(optimizer) -> list[torch.Tensor]:
    """All tensors of a whole state, in the order of parameters and names."""
    state = optimizer.state_dict()["state"]
    return [value for place in sorted(state) for _, value in sorted(state[place].items()) if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@run_ranks(1, 2, 3, 4)
def test_updates_and_state_equal_one_process(kind, clip_norm):
    model = mlp()
    alone, make = copy.deepcopy(model), OPTIMIZERS[kind]
    steps = [batch(9, seed) for seed in range(12)]
    plain = make(alone.parameters())
    train(alone, plain, steps, loss_sum, clip_norm=clip_norm)
    optimizer = sharded(model, make(model.parameters()), clip_norm=clip_norm)
    for tensors in steps:
        one_step(model, optimizer, tensors, 2)
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
    assert_same(values(model), values(alone), 1e-9)
    whole, expected = state_of(optimizer), state_of(plain)
    assert [tensor.shape for tensor in whole] == [tensor.shape for tensor in expected]
    for mine, theirs in zip(whole, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=1e-8, atol=1e-10)


@run_ranks(2, 3, 4)
def test_a_rank_holds_its_share_of_the_state(world_size):
    model = nn.Linear(1000, 40).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.01), model, strategy="sharded")
    for _ in optimizer.micro_batches([None]):
        optimizer.backward(model(torch.ones(2, 1000, device=hora.device())).sum(), weight=2)
    optimizer.step()
    elements = sum(value.numel() for state in optimizer.state.values() for name, value in state.items() if name != "step")
    assert elements <= math.ceil(2 * 40_040 / world_size) + 2 * 16 * world_size
    assert sum(hora.all_gather_object(elements)) == 2 * 40_040
    assert not optimizer.optimizer.state


class Layout(nn.Module):
    """Parameters of all kinds: 0-d, channels_last, tied, frozen, of two dtypes, one that nobody uses, one that some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, dtype=torch.float64)
        self.tied = self.first.weight
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.unused, self.sometimes = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(5))

    def forward(self, inputs, use):
        hidden = self.first(self.convolution(inputs).mean((2, 3)) * self.scale) @ self.tied + self.frozen
        return self.second(hidden.double()).sum() + (self.sometimes.sum() if use else 0.0)


@run_ranks(1, 2, 3, 4)
def test_parameters_of_every_kind_are_as_in_one_process(world_size):
    def inputs(step):
        return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step)).to(hora.device())

    def uses(step, sample):
        return step >= 2 and sample == 3  # on one rank, from the third step on

    model = Layout().to(hora.device())
    alone = copy.deepcopy(model)
    groups = [
        lambda m: {"params": [p for name, p in m.named_parameters() if "weight" in name], "weight_decay": 0.1},
        lambda m: {"params": [p for name, p in m.named_parameters() if "weight" not in name], "lr": 0.02},
    ]
    plain = torch.optim.AdamW([group(alone) for group in groups], 0.01)
    optimizer = sharded(model, torch.optim.AdamW([group(model) for group in groups], 0.01))
    scheduler, theirs = (torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, plain))
    for step in range(5):
        plain.zero_grad()
        (sum(alone(inputs(step)[sample : sample + 1], uses(step, sample)) for sample in range(4)) / 4).backward()
        plain.step()
        theirs.step()
        mine = list(range(4))[hora.rank() :: world_size]
        for sample in optimizer.micro_batches(mine):
            optimizer.backward(model(inputs(step)[sample : sample + 1], uses(step, sample)), weight=1)
        optimizer.step()
        scheduler.step()
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)
    assert torch.equal(model.unused, torch.ones(7, device=hora.device()))
    whole, expected = optimizer.state_dict(), plain.state_dict()
    chosen = {"fused": whole["param_groups"][0]["fused"]}  # on a GPU, by Hora
    assert whole["param_groups"] == [{**group, **chosen} for group in expected["param_groups"]]
    assert whole["state"].keys() == expected["state"].keys()
    for place, state in expected["state"].items():
        for key, value in state.items():
            found = whole["state"][place][key]
            assert (found.shape, found.stride()) == (value.shape, value.stride()), (place, key)
            torch.testing.assert_close(found.cpu(), value.cpu(), rtol=1e-3, atol=1e-5)


def run_with(strategy, state=None, steps=range(4), seed_model=None):
    model = mlp()
    if seed_model is not None:
        model.load_state_dict(seed_model)
    optimizer = hora.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), 0.01), model, strategy=strategy, bucket_cap_bytes=TINY_BUCKETS, clip_norm=1.0
    )
    if state is not None:
        optimizer.load_state_dict(state)
    for seed in steps:
        one_step(model, optimizer, batch(8, seed), 2)
        optimizer.step()
    return model, optimizer


@run_ranks(1, 2, 3)
@pytest.mark.parametrize(("before", "after"), [("sharded", "sharded"), ("sharded", "overlap"), ("overlap", "sharded")])
def test_state_goes_from_one_strategy_to_another(before, after):
    whole, _ = run_with("overlap", steps=range(8))
    model, optimizer = run_with(before)
    again, _ = run_with(after, optimizer.state_dict(), range(4, 8), model.state_dict())
    assert_same(values(again), values(whole), 1e-9)


@run_ranks(2)
def test_state_that_the_optimizer_has_already_is_dealt_out(world_size):
    whole, _ = run_with("overlap", steps=range(8))
    model, before = run_with("overlap")
    again = mlp()
    again.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(again.parameters(), 0.01)
    plain.load_state_dict(before.state_dict())
    optimizer = sharded(again, plain, clip_norm=1.0)
    for seed in range(4, 8):
        one_step(again, optimizer, batch(8, seed), 2)
        optimizer.step()
    assert_same(values(again), values(whole), 1e-9)
    assert not plain.state


@run_ranks(1, 3)
def test_a_new_one_of_the_same_optimizer_goes_on_with_its_state(world_size):
    """As after layers were unfrozen; also under another strategy, and where the old one is gone."""
    model = mlp()
    model[0].requires_grad_(False)
    alone = copy.deepcopy(model)
    optimizer, plain = sharded(model, torch.optim.AdamW(model.parameters(), 0.01)), torch.optim.AdamW(alone.parameters(), 0.01)
    for seed in range(6):
        if seed == 2:
            for each in (model, alone):
                each[0].requires_grad_(True)
            optimizer = sharded(model, optimizer.optimizer)
            assert len(optimizer.optimizer.state_dict()["state"]) == 4  # what it had, whole, although the state is dealt out
        elif seed == 4:
            for each in (model, alone):
                each[0].requires_grad_(False)
            optimizer = hora.DistributedOptimizer(optimizer.optimizer, model)
            assert len(optimizer.state) == 6
        train(alone, plain, [batch(9, seed)], loss_sum)
        one_step(model, optimizer, batch(9, seed), 2)
        optimizer.step()
    assert_same(values(model), values(alone), 1e-9)
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer = sharded(model, inner)
    inner.load_state_dict({**plain.state_dict(), "param_groups": inner.state_dict()["param_groups"]})
    assert not inner.state
    assert [tensor.tolist() for tensor in state_of(optimizer)] == [tensor.tolist() for tensor in state_of(plain)]
    with pytest.raises(ConfigError, match=r"changes nothing.*call step\(\) of the DistributedOptimizer"):
        inner.step()
    assert not has_step_hooks(inner)
    again = sharded(model, inner)
    one_step(model, optimizer, batch(9), 2)
    with pytest.raises(ConfigError, match="another one was made of it since: use that"):
        optimizer.step()
    del again, optimizer
    gc.collect()
    with pytest.raises(ConfigError, match="is with its DistributedOptimizer, but that is gone: keep it"):
        sharded(model, inner)


@run_ranks(2, 3)
def test_parameters_changed_from_outside_are_taken_as_they_are(world_size):
    model = mlp()
    optimizer = sharded(model, torch.optim.SGD(model.parameters(), 0.1))
    for seed in range(3):
        one_step(model, optimizer, batch(6, seed), 2)
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
    before = [parameter.clone() for parameter in model.parameters()]
    one_step(model, optimizer, batch(6, 9), 2)
    optimizer.step()
    assert all((parameter - old).abs().max() < 1.0 for parameter, old in zip(model.parameters(), before, strict=True))


@run_ranks(2, 3)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_applied_on_none(world_size, policy):
    model = mlp(torch.float32)
    optimizer = sharded(model, torch.optim.SGD(model.parameters(), 0.1), clip_norm=1.0, checks=hora.Checks(non_finite=policy))
    before = [parameter.clone() for parameter in model.parameters()]
    inputs, targets = batch(4, dtype=torch.float32)
    if hora.rank() == world_size - 1:
        inputs[0] = math.nan

    def step():
        for _ in optimizer.micro_batches([None]):
            optimizer.backward(loss_sum(model, inputs, targets), weight=4)
        optimizer.step()
        optimizer.settle_checks()

    if policy == "raise":
        with pytest.raises(NonFiniteGradient, match=f"on rank {world_size - 1} first at micro-step 0"):
            step()
    else:
        step()
        assert optimizer.skipped_steps == 1
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


@run_ranks(2, 3, 4)
def test_a_rank_without_a_share_leaves_out_what_the_others_leave_out(world_size):
    """It has no momentum to wait for, as they have before their first update; where it did not wait for them, they waited for it for ever."""
    torch.manual_seed(0)
    model = nn.Linear(7, 2).to(hora.device())  # 16 elements are one rank's
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True), model, strategy="sharded", checks=hora.Checks(non_finite="skip")
    )
    inputs, _ = batch(4, dtype=torch.float32)
    left_to_the_device = []
    for step in range(5):
        for _ in optimizer.micro_batches([None]):
            optimizer.backward(model(inputs).sum() * (math.inf if step in (0, 3) else 1.0), weight=4)
        left_to_the_device.append(optimizer.synchronizer.switches_off_on_device(optimizer.applied))
        optimizer.step()
    optimizer.settle_checks()
    assert left_to_the_device == [False, False, True, True, True]
    assert optimizer.skipped_steps == 2
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@run_ranks(1, 2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_hooks_and_schedules_of_the_users_optimizer_see_each_step(world_size, kind):
    model = mlp()
    inner = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = sharded(model, inner)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].bias[0].item()))
    inner.register_step_post_hook(lambda *_: seen.append(model[0].bias[0].item()))
    for _ in optimizer.micro_batches([None]):
        optimizer.backward(loss_sum(model, *batch(4)), weight=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        schedule.step()
    assert len(seen) == 2
    assert seen[0] != seen[1]
    assert not inner.state


@run_ranks(1, 2)
@pytest.mark.parametrize("other", ["sharded", "overlap"])
def test_a_plain_loop_does_not_go_through_parameters_of_two_models(world_size, other):
    """The one whose hooks come last took the gradient, and the other one's optimizer left the parameter as it was."""
    part = nn.Linear(4, 4).to(hora.device())
    models = [nn.Sequential(part, nn.Linear(4, size)).to(hora.device()) for size in (2, 3)]
    optimizers = [
        hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy)
        for model, strategy in zip(models, ("sharded", other), strict=True)
    ]
    inputs = torch.ones(2, 4, device=hora.device())
    for model, optimizer in zip(models, optimizers, strict=True):
        before = part.weight.detach().clone()
        for _ in optimizer.micro_batches([None]):
            optimizer.backward(model(inputs).sum(), weight=2)
        optimizer.step()
        assert not torch.equal(before, part.weight)
    models[0](inputs).sum().backward()  # both have been told what to do with gradients by `backward(weight=)` alone
    again = [
        hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy)
        for model, strategy in zip([nn.Sequential(model) for model in models], ("sharded", other), strict=True)
    ]
    with pytest.raises(ConfigError, match=r'"sharded" is used.*\'0.0.weight\' belongs to another one too'):
        models[0](inputs).sum().backward()
    del again


@run_ranks(2)
def test_plain_loops_and_train_step_work_too(world_size):
    models = [mlp(torch.float32) for _ in range(3)]
    optimizers = [hora.DistributedOptimizer(torch.optim.AdamW(m.parameters(), 0.01), m, strategy=s)
                  for m, s in zip(models, ("sharded", "sharded", "overlap"), strict=True)]  # fmt: skip

    def loss_fn(model, batch, state):
        return loss_sum(model, *batch), len(batch[0]), {}, state

    train_step = hora.TrainStep(models[1], loss_fn, optimizers[1])
    for seed in range(4):
        inputs, targets = batch(4, seed + 10 * hora.rank(), torch.float32)
        for model, optimizer in ((models[0], optimizers[0]), (models[2], optimizers[2])):
            optimizer.zero_grad()
            (loss_sum(model, inputs, targets) / 4).backward()
            optimizer.step()
        train_step([(inputs, targets)])
    for first, second, third in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(first, third, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(second, third, rtol=1e-4, atol=1e-6)


def body_exact() -> None:
    model = mlp()
    with pytest.raises(ConfigError, match='strategy "sharded" sums in the order of the backend'):
        sharded(model, torch.optim.SGD(model.parameters(), 0.1))


def test_exact_mode_refuses_it(spawn_ranks):
    outcomes = spawn_ranks(2, body_exact, init={"exact": True}).wait(60.0)
    assert [outcome.kind for outcome in outcomes] == ["passed"] * 2, outcomes


@run_ranks(2)
def test_what_cannot_be_sharded_is_refused_with_the_reason(world_size):
    model = mlp(torch.float32)
    with pytest.raises(ConfigError, match="Adafactor is not known to be one"):
        sharded(model, torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ConfigError, match="but 2 of 6 are not in this one"):
        sharded(model, torch.optim.SGD(list(model.parameters())[2:], 0.1))
    model = mlp()
    with pytest.raises(ConfigError, match="repair=True"):
        sharded(model, torch.optim.SGD(model.parameters(), 0.1), checks=hora.Checks(repair=True))
    model = mlp()
    optimizer = sharded(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match="deals the parameters out when it begins"):
        optimizer.add_param_group({"params": []})
    layer = nn.Linear(2, 2, dtype=torch.complex64).to(hora.device())
    with pytest.raises(ConfigError, match="takes real parameters, but weight is complex"):
        sharded(layer, torch.optim.SGD(layer.parameters(), 0.1))
    embedding = nn.Embedding(5, 3, sparse=True).to(hora.device())
    with pytest.raises(ConfigError, match="an embedding with sparse=True"):
        sharded(embedding, torch.optim.SGD(embedding.parameters(), 0.1))


@run_ranks(2)
def test_bfloat16_parameters(world_size):
    model = mlp(torch.bfloat16)
    other = copy.deepcopy(model)
    optimizer = sharded(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    overlap = hora.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1, momentum=0.9), other, bucket_cap_bytes=TINY_BUCKETS)
    for seed in range(3):
        for each, one in ((model, optimizer), (other, overlap)):
            one_step(each, one, batch(8, seed, torch.bfloat16), 2)
            one.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
