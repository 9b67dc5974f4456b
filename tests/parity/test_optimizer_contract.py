"""What users rely on beyond the gradient: scalers, schedules, several optimizers, GANs, checkpointing, compile, and errors that say so."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from test_gradients import STRATEGIES, TINY_BUCKETS, batch, gradients, loss_sum, micro, mlp, one_step, share, values
from torch import nn
from torch.utils.checkpoint import checkpoint

import hora
from hora import events
from hora.errors import CollectiveMismatch, ConfigError
from hora.testing import run_ranks
from hora.testing.reference import assert_same, global_gradients


def distributed(model: nn.Module, **settings: object) -> hora.DistributedOptimizer:
    return hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model, **settings)


@run_ranks(1, 2, 3)
def test_groups_state_and_defaults_are_the_wrapped_optimizers_own() -> None:
    model = mlp()
    inner = torch.optim.AdamW(model.parameters(), 0.1)
    optimizer = hora.DistributedOptimizer(inner, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    one_step(model, optimizer, batch(6), 2)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5


@run_ranks(1, 2)
def test_schedulers_drive_the_wrapped_optimizer_without_warnings() -> None:
    model = mlp()
    optimizer = distributed(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rates = []
    for _ in range(4):
        one_step(model, optimizer, batch(4), 4)
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.05, 0.025]


@run_ranks(2, 3)
def test_all_ranks_begin_with_rank_zeros_parameters_buffers_and_state() -> None:
    torch.manual_seed(hora.rank())
    model = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4)).to(hora.device())
    model[1].running_mean.fill_(float(hora.rank() + 1))
    inner = torch.optim.Adam(model.parameters(), 0.1 * (hora.rank() + 1))
    if hora.rank() == 0:  # only rank 0 has a state, as after resuming there
        model(torch.ones(3, 7, device=hora.device())).sum().backward()
        inner.step()
    hora.DistributedOptimizer(inner, model)
    states = hora.all_gather_object([model.state_dict(), inner.state_dict()])
    for other in states[1:]:
        assert str(other) == str(states[0])
    assert states[0][1]["state"][0]["step"] == 1
    assert states[0][1]["param_groups"][0]["lr"] == pytest.approx(0.1)


@run_ranks(2, 3)
def test_an_empty_state_on_rank_zero_empties_the_others_and_takes_no_step() -> None:
    model = mlp()
    before = copy.deepcopy(values(model))
    inner = torch.optim.Adam(model.parameters())
    hora.DistributedOptimizer(inner, model)
    assert not inner.state_dict()["state"]
    assert_same(values(model), before, 0.0)


@run_ranks(1, 2, 3)
def test_grad_scaler_skips_on_all_ranks_when_one_overflows() -> None:
    model = mlp(torch.float32)
    optimizer = distributed(model)
    scaler = torch.amp.GradScaler(hora.device().type, init_scale=64.0, growth_interval=1)
    history = []
    for step in range(3):
        before = copy.deepcopy(values(model))
        for inputs, targets in optimizer.micro_batches(micro(batch(6, dtype=torch.float32), 3)):
            loss = scaler.scale(loss_sum(model, inputs, targets))
            if step == 1 and hora.rank() == hora.world_size() - 1:
                loss = loss * float("inf")
            optimizer.backward(loss, weight=len(inputs))
        if step == 0:
            wanted = global_gradients(model, *batch(6, dtype=torch.float32), loss_sum)
            scaler.unscale_(optimizer)
            assert_same(gradients(model), wanted, 1e-5)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(before[name], value) for name, value in values(model).items())
        history.append((moved, scaler.get_scale()))
    assert history == [(True, 128.0), (False, 64.0), (True, 128.0)]


@run_ranks(1, 2, 3)
def test_clip_norm_equals_stock_clipping_of_the_global_gradient() -> None:
    model, twin = mlp(), mlp()
    clipped, stock = distributed(model, clip_norm=0.01), distributed(twin)
    one_step(model, clipped, batch(6), 2)
    clipped.step()
    one_step(twin, stock, batch(6), 2)
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    stock.step()
    assert clipped.last_grad_norm == norm
    assert_same(values(model), values(twin), 0.0)


@run_ranks(1, 2)
def test_two_optimizers_over_one_model_share_its_gradients_in_plain_and_explicit_loops() -> None:
    for explicit in (True, False):
        model = mlp()
        alone = copy.deepcopy(model)
        first = hora.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), 0.1), model)
        second = hora.DistributedOptimizer(torch.optim.Adam(model[2:].parameters(), 0.1), model)
        plain = [torch.optim.SGD(alone[0].parameters(), 0.1), torch.optim.Adam(alone[2:].parameters(), 0.1)]
        for seed in range(3):
            tensors = batch(6, seed)
            if explicit:
                one_step(model, first, tensors, 2)
            else:
                x, y = (share(tensor) for tensor in tensors)
                F.cross_entropy(model(x), y).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            (loss_sum(alone, *tensors) / 6).backward()
            for optimizer in plain:
                optimizer.step()
                optimizer.zero_grad()
        assert_same(values(model), values(alone), 1e-9)


@pytest.mark.parametrize("explicit", [True, False])
@run_ranks(1, 2, 3)
def test_a_gan_trains_as_in_one_process(explicit: bool) -> None:
    """The generator's backward runs through the discriminator; `discriminator.zero_grad()` is the module's own, unseen by the optimizer."""

    def pair() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(2)
        return nn.Linear(3, 7).double().to(hora.device()), nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).double().to(
            hora.device()
        )

    def losses(
        generator: nn.Module, discriminator: nn.Module, real: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return -F.logsigmoid(discriminator(real)).sum(), -F.logsigmoid(-discriminator(generator(noise).detach())).sum()

    noise = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(hora.device())
    real = batch(6)[0]
    generator, discriminator = pair()
    twin_generator, twin_discriminator = pair()
    makes = [lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda m: torch.optim.Adam(m.parameters(), 0.05)]
    g, d = (hora.DistributedOptimizer(make(m), m) for make, m in zip(makes, (generator, discriminator), strict=True))
    tg, td = (make(m) for make, m in zip(makes, (twin_generator, twin_discriminator), strict=True))
    mine, size = (share(real), share(noise)), len(share(real))
    for _ in range(4):
        discriminator.zero_grad()
        pairs = losses(generator, discriminator, *mine)
        if explicit:
            d.backward(pairs, weight=size)
        else:
            (sum(pairs) / size).backward()
        d.step()
        generator.zero_grad()
        fooled = -F.logsigmoid(discriminator(generator(mine[1]))).sum()
        if explicit:
            g.backward(fooled, weight=size)
        else:
            (fooled / size).backward()
        g.step()
        td.zero_grad()
        (sum(losses(twin_generator, twin_discriminator, real, noise)) / 6).backward()
        td.step()
        tg.zero_grad()
        (-F.logsigmoid(twin_discriminator(twin_generator(noise))).sum() / 6).backward()
        tg.step()
    assert_same(values(generator), values(twin_generator), 1e-9)
    assert_same(values(discriminator), values(twin_discriminator), 1e-9)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.inner = mlp()
        self.reentrant, self.shared = reentrant, shared

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.requires_grad_(True)
        for part in (self.inner[:2], self.inner[2:]):
            hidden = checkpoint(part, hidden, use_reentrant=self.reentrant)
        return hidden


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@run_ranks(1, 2)
def test_activation_checkpointing_changes_nothing(strategy: str, reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    optimizer = distributed(model, strategy=strategy, bucket_cap_bytes=TINY_BUCKETS)
    one_step(model, optimizer, batch(6), 2)
    expected = global_gradients(mlp(), *batch(6), loss_sum)
    assert_same(gradients(model), {f"inner.{name}": value for name, value in expected.items()}, 1e-9)


@run_ranks(1, 2)
def test_a_compiled_model_gives_the_same_gradients() -> None:
    model, tensors = mlp(), batch(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.11 warns inside its own compiler on Python 3.12
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), compiled)
        for inputs, targets in optimizer.micro_batches(micro(tensors, 100)):
            optimizer.backward(F.cross_entropy(compiled(inputs), targets, reduction="sum"), weight=len(inputs))
        assert_same(gradients(model), global_gradients(mlp(), *tensors, loss_sum), 1e-9)
        torch.compiler.reset()


class Recorder(events.Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_collective(self, *, kind: str, sequence: int, size_bytes: int, phase: str) -> None:
        if phase == "begin":
            self.lines.append(kind)


@run_ranks(1, 2)
def test_buckets_leave_during_the_last_backward_only() -> None:
    model = mlp()
    optimizer = distributed(model, bucket_cap_bytes=TINY_BUCKETS)
    recorder = Recorder()
    # Runs when backward reaches the first layer: the last layers' buckets must have left by then.
    model[0].register_full_backward_hook(lambda *_: recorder.lines.append("first layer"))
    inputs, targets = batch(2)
    inputs.requires_grad_(True)
    with events.observe(recorder):
        for index, (x, y) in enumerate(optimizer.micro_batches([(inputs, targets)] * 3)):
            recorder.lines.append(f"micro-batch {index}")
            optimizer.backward(loss_sum(model, x, y), weight=len(x))
    before, after = recorder.lines[: recorder.lines.index("micro-batch 2")], recorder.lines[recorder.lines.index("micro-batch 2") :]
    assert "all_reduce" not in before
    assert after[: after.index("first layer")].count("all_reduce") >= 1
    assert after.count("all_reduce") == len(optimizer._synchronizer._buckets)
    assert after.index("update") < after.index("all_reduce")


@run_ranks(1, 2)
def test_a_stop_asked_by_one_rank_is_seen_by_all_in_the_same_step() -> None:
    model = mlp()
    optimizer = distributed(model)
    seen = []
    for step in range(3):
        if step == 1 and hora.rank() == hora.world_size() - 1:
            optimizer.request_stop()
        one_step(model, optimizer, batch(4), 2)
        optimizer.step()
        seen.append(optimizer.stop_agreed)
    assert seen == [step >= 1 for step in range(3)]


@run_ranks(1, 2)
def test_a_group_that_is_added_later_is_trained() -> None:
    """However its parameters are given; an iterator is gone through once."""
    for give in (nn.Module.parameters, lambda layer: list(layer.parameters()), nn.Module.named_parameters):
        model = mlp()
        alone = copy.deepcopy(model)
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(give(model[2:]), 0.1), model)
        plain = torch.optim.SGD(alone[2:].parameters(), 0.1)
        optimizer.add_param_group({"params": give(model[0]), "lr": 0.01})
        plain.add_param_group({"params": alone[0].parameters(), "lr": 0.01})
        one_step(model, optimizer, batch(6), 2)
        optimizer.step()
        (loss_sum(alone, *batch(6)) / 6).backward()
        plain.step()
        assert_same(values(model), values(alone), 1e-9)
    with pytest.raises(ConfigError, match=r"must belong to the model, but parameter 0 \(shape \[2\]\)"):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2))})


# Errors that say so ---------------------------------------------------------------------------------------------------------------------


@run_ranks(1, 2)
def test_a_model_that_sums_its_gradients_itself_is_refused() -> None:
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model)
    for make in (distributed, lambda model: hora.TrainStep(model, lambda *_: None, torch.optim.SGD(model.parameters(), 0.1))):
        with pytest.raises(ConfigError, match=r"must be unwrapped, but is a DistributedDataParallel.*model\.module, or keep Distributed"):
            make(wrapped)
    distributed(model)


@run_ranks(1, 2)
def test_a_second_backward_after_the_last_is_an_error() -> None:
    model = mlp()
    optimizer = distributed(model)
    inputs, targets = batch(4)
    with pytest.raises(ConfigError, match=r"second one came after the last.*loss_a, loss_b"):
        for x, y in optimizer.micro_batches([(inputs, targets)]):
            optimizer.backward(loss_sum(model, x, y), weight=4)
            optimizer.backward(loss_sum(model, x, y), weight=4)


@run_ranks(1, 2)
def test_a_second_plain_backward_is_an_error_unless_the_gradients_were_cleared() -> None:
    model = mlp()
    optimizer = distributed(model)
    loss_sum(model, *batch(4)).backward()
    with pytest.raises(
        ConfigError, match="after the last of its window.*: loop over the micro-batches of a step by optimizer.micro_batches"
    ):
        loss_sum(model, *batch(4)).backward()
    optimizer.zero_grad()
    loss_sum(model, *batch(4)).backward()
    optimizer.step()


@run_ranks(1, 2)
def test_parameters_added_or_frozen_later_are_named() -> None:
    for change, name in (
        (lambda m: m.add_module("late", nn.Linear(3, 3).double().to(hora.device())), "late.weight"),
        (lambda m: m[0].requires_grad_(False), "0.weight"),
    ):
        model = mlp()
        optimizer = distributed(model)
        one_step(model, optimizer, batch(4), 2)
        optimizer.step()
        change(model)
        with pytest.raises(ConfigError, match=f"{name}.*make a new DistributedOptimizer"):
            one_step(model, optimizer, batch(4), 2)
        fresh = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        one_step(model, fresh, batch(4), 2)


@pytest.mark.parametrize("strategy", ["overlap", "sharded"])
@run_ranks(1, 2)
def test_parameters_converted_later_are_named(strategy: str) -> None:
    model = mlp(torch.float32)
    optimizer = distributed(model, strategy=strategy)
    model.double()
    with pytest.raises(ConfigError, match=r"0.weight was torch.float32 on .* and is torch.float64 .*; convert or move the model first"):
        one_step(model, optimizer, batch(4), 2)
    model.float()
    one_step(model, optimizer, batch(4, dtype=torch.float32), 2)
    optimizer.step()


@run_ranks(1, 2)
def test_a_step_without_a_complete_window_is_an_error() -> None:
    model = mlp()
    optimizer = distributed(model)
    inputs, targets = batch(4)
    for x, y in optimizer.micro_batches([(inputs, targets)] * 2):
        optimizer.backward(loss_sum(model, x, y), weight=4)
        break
    with pytest.raises(ConfigError, match="to its end"):
        optimizer.step()


@pytest.mark.parametrize("strategy", ["overlap", "sharded"])
@run_ranks(1, 2)
def test_gradients_that_are_cleared_between_micro_batches_are_noticed(strategy: str) -> None:
    """As by a loop that was written for one batch a step: what came before would be lost, or its weight counted without it."""
    model = mlp()
    optimizer = distributed(model, strategy=strategy)
    micro_batches = micro(batch(6), 1)
    for clear in (optimizer.zero_grad, model.zero_grad):
        for last in (False, True):
            with pytest.raises(ConfigError, match=r"cleared between two of them: leave out zero_grad\(\) inside the loop"):
                for number, (inputs, targets) in enumerate(optimizer.micro_batches(micro_batches)):
                    if not last or number == len(micro_batches) - 1:
                        clear()
                        if last:
                            continue
                    optimizer.backward(loss_sum(model, inputs, targets), weight=len(inputs))
    optimizer.zero_grad()  # of a loop that was left
    for inputs, targets in optimizer.micro_batches(micro_batches[:1]):
        optimizer.zero_grad()
        optimizer.backward(loss_sum(model, inputs, targets), weight=len(inputs))
    optimizer.step()
    optimizer.zero_grad()


@run_ranks(1, 2)
def test_a_plain_backward_beside_the_micro_batches_own_is_noticed() -> None:
    """As for an adversarial example, whose gradients of the parameters were added without a weight, or to the complete ones of one rank."""
    model = mlp()
    optimizer = distributed(model)
    inputs, targets = batch(6)
    message = r"must be optimizer.backward.*but loss.backward\(\) was called, which adds .* torch.autograd.grad"
    for before in (True, False):
        with pytest.raises(ConfigError, match=message):
            for _ in optimizer.micro_batches([None] * 2):
                for plain in (before, not before):
                    if plain:
                        loss_sum(model, inputs, targets).backward()
                    else:
                        optimizer.backward(loss_sum(model, inputs, targets), weight=6)
    one_step(model, optimizer, (inputs, targets), 2)
    loss_sum(model, inputs, targets).backward()
    with pytest.raises(ConfigError, match=message):
        optimizer.step()
    for _ in optimizer.micro_batches([None] * 2):
        torch.autograd.grad(loss_sum(model, inputs.requires_grad_(), targets), inputs)
        optimizer.backward(loss_sum(model, inputs, targets), weight=6)
    optimizer.step()
    loss_sum(model, inputs, targets).backward()  # as of a GAN's generator, whose loop is a plain one


@run_ranks(1, 2)
def test_an_exception_in_a_backward_before_the_last_is_not_gone_on_from() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(hora.device())
    optimizer = distributed(model)
    inputs = torch.ones(2, 3, device=hora.device())

    def one_step(*, clear: bool) -> None:
        Breaks.left = 1
        for _ in optimizer.micro_batches([None] * 3):
            try:
                optimizer.backward(model[1](Breaks.apply(model[0](inputs))).sum(), weight=2)
            except MemoryError:
                if clear:
                    optimizer.zero_grad()

    with pytest.raises(ConfigError, match="exception has ended the backward of one before: let the exception end the job"):
        one_step(clear=False)
    one_step(clear=True)
    optimizer.step()


@run_ranks(1, 2)
def test_misuse_is_refused_with_the_reason() -> None:
    model = mlp()
    optimizer = distributed(model)
    with pytest.raises(ConfigError, match="DistributedOptimizer already"):
        hora.DistributedOptimizer(optimizer, model)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: None)
    with pytest.raises(ConfigError, match="weight must be a finite number from 0"):
        optimizer.backward(loss_sum(model, *batch(2)), weight=-1)
    with pytest.raises(ConfigError, match=r"shape \[4, 4\].*does not"):
        hora.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(4, 4))], 0.1), model)
    with pytest.raises(ConfigError, match="choose one of: deferred, overlap"):
        distributed(mlp(), strategy="overlapp")
    with pytest.raises(ConfigError, match="same settings"):
        distributed(model, strategy="deferred")
    with pytest.raises(ConfigError, match="no trainable parameter|requires_grad=True"):
        distributed(mlp().requires_grad_(False))
    with pytest.raises(ConfigError, match="clip_norm must be greater than 0"):
        distributed(mlp(), clip_norm=0.0)
    for number in (1.5, "2", 0):
        with pytest.raises(ConfigError, match="accumulation_steps must be a whole number"):
            distributed(mlp(), accumulation_steps=number)
    with pytest.raises(ConfigError, match="clip_norm must be greater than 0 or None, but is '1'"):
        distributed(mlp(), clip_norm="1")
    with pytest.raises(ConfigError, match="checks must be a hora.Checks, but is a dict"):
        distributed(mlp(), checks={"non_finite": "skip"})
    with pytest.raises(ConfigError, match="optimizer must be a torch optimizer.*but is the class SGD"):
        hora.DistributedOptimizer(torch.optim.SGD, model)
    refused = mlp()
    with pytest.raises(ConfigError, match="clip_norm must be"):
        distributed(refused, clip_norm=-1, strategy="sharded")
    distributed(refused, strategy="deferred")  # the next try may have other settings
    embedding = nn.Embedding(4, 2, sparse=True).to(hora.device())
    with pytest.raises(ConfigError, match="clip_norm takes dense gradients, but weight is an embedding with sparse=True"):
        hora.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), 0.1), embedding, clip_norm=1.0)
    for losses in ([], "loss", None, 0.5, torch.ones(3, requires_grad=True), [loss_sum(model, *batch(2)), torch.ones(())]):
        with pytest.raises(ConfigError, match="backward takes the summed loss as a scalar that depends on the parameters"):
            for _ in optimizer.micro_batches([None]):
                optimizer.backward(losses, weight=1)
    with pytest.raises(ConfigError, match=r"must be optimizer.backward.*but loss.backward\(\) was called"):
        for _ in optimizer.micro_batches([None]):
            loss_sum(model, *batch(2)).backward()
    with pytest.raises(ConfigError, match="LBFGS wants a closure"):
        hora.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model)
    lazy = nn.Sequential(nn.Linear(7, 3), nn.LazyLinear(3)).to(hora.device())
    with pytest.raises(ConfigError, match=r"lazy .* first forward: 1.weight, 1.bias; call the model on one batch before"):
        distributed(lazy)
    for weight in (None, "3", [1]):
        with pytest.raises(ConfigError, match="weight must be a number or a tensor with one element"):
            optimizer.backward(loss_sum(model, *batch(2)), weight=weight)
    with pytest.raises(ConfigError, match="accumulation_steps=1"):
        other = mlp()
        list(distributed(other, accumulation_steps=2).micro_batches([1]))


@run_ranks(2, 3)
def test_ranks_with_different_models_are_told_the_first_parameter_that_differs() -> None:
    width = 6 if hora.rank() == hora.world_size() - 1 else 5
    model = nn.Sequential(nn.Linear(7, 4), nn.Linear(4, width)).to(hora.device())
    with pytest.raises(CollectiveMismatch, match=rf"'1.weight' \[5, 4\].*rank 0 and '1.weight' \[6, 4\].*rank {hora.world_size() - 1}"):
        distributed(model)


@run_ranks(2)
def test_ranks_that_clip_otherwise_are_told() -> None:
    with pytest.raises(CollectiveMismatch, match=r"same arguments.*clip_norm is 0\.5 on rank 0 and None on rank 1"):
        distributed(mlp(), clip_norm=0.5 if hora.rank() == 0 else None)


@run_ranks(1, 2)
def test_a_model_that_anothers_backward_goes_through_waits_for_its_own() -> None:
    """A GAN whose generator is trained first, in as many micro-batches as each rank has."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 3).to(hora.device(), torch.float64), nn.Linear(3, 1).to(hora.device(), torch.float64)]
    alone = copy.deepcopy(models)
    first, second = (distributed(model) for model in models)
    inputs = torch.arange(12, dtype=torch.float64, device=hora.device()).view(4, 3)
    mine = inputs.split([3, 1])[hora.rank()] if hora.world_size() == 2 else inputs
    for sample in first.micro_batches(mine):
        first.backward(models[1](models[0](sample)).square().sum(), weight=1)
    with pytest.raises(
        ConfigError, match=r"step\(\) must follow a backward of its own optimizer.*\(weight, bias\).*into one nn.ModuleList"
    ):
        second.step()
    for sample in second.micro_batches(mine):
        second.backward(models[1](models[0](sample).detach()).sum(), weight=1)
    alone[1](alone[0](inputs)).square().sum().div(4).backward()
    torch.testing.assert_close(models[0].weight.grad, alone[0].weight.grad)
    alone[1].zero_grad()
    alone[1](alone[0](inputs).detach()).sum().div(4).backward()
    torch.testing.assert_close(models[1].weight.grad, alone[1].weight.grad)


@run_ranks(2, 3)
def test_ranks_that_send_gradients_of_different_models_are_told() -> None:
    """Same shapes, but rank 0 trains `a` first and the others `b`: the sums would be silently wrong."""
    models = [nn.Linear(3, 3).to(hora.device()), nn.Sequential(nn.Linear(3, 3)).to(hora.device())]
    optimizers = [distributed(model) for model in models]
    order = (0, 1) if hora.rank() == 0 else (1, 0)
    named = r"sum update 0 of model \d+ \(weight, bias\)(.|\n)*sum update 0 of model \d+ \(0.weight, 0.bias\)"
    with pytest.raises(CollectiveMismatch, match=named):
        for which in order:
            for _ in optimizers[which].micro_batches([None]):
                optimizers[which].backward(models[which](torch.ones(1, 3, device=hora.device())).sum(), weight=1)


@run_ranks(1, 2)
def test_state_larger_than_an_object_may_be_is_given_to_everybody() -> None:
    model = nn.Linear(3000, 3000).to(hora.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (hora.rank() + 1))
    if hora.rank() == 0:
        model(torch.ones(1, 3000, device=hora.device())).sum().backward()
        optimizer.step()
    wrapped = hora.DistributedOptimizer(optimizer, model)
    assert wrapped.param_groups[0]["lr"] == 0.1
    moment = wrapped.state[model.weight]["exp_avg"]
    assert torch.allclose(moment, torch.full_like(moment, 0.1))
    assert wrapped.state[model.weight]["step"] == 1.0


@run_ranks(2)
def test_state_that_cannot_be_sent_is_refused_on_all_ranks() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[next(model.parameters())]["thing"] = object()
    with pytest.raises(ConfigError, match="object"):
        hora.broadcast_optimizer_state(optimizer)


@run_ranks(2)
def test_embedding_that_changes_its_rows_in_forward_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 is an embedding with max_norm=0.5.*drift apart"):
        distributed(nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 1)))


@run_ranks(1, 2)
def test_list_of_parameters_is_no_model() -> None:
    parameters = list(mlp().parameters())
    with pytest.raises(ConfigError, match="must be the module .* but is a list"):
        hora.DistributedOptimizer(torch.optim.SGD(parameters, 0.1), parameters)


def test_models_used_on_some_ranks_only_are_not_mixed_up(spawn_ranks) -> None:
    """Rank 0 uses both models in one pass, rank 1 the first: their sums leave in another order, and that is told."""
    outcomes = spawn_ranks(2, body_uses_one_of_two, init={"timeout_s": 10.0}).wait(60.0)
    found = {outcome.result for outcome in outcomes}
    assert "CollectiveMismatch" in found
    assert found <= {"CollectiveMismatch", "PeerLost"}  # whoever is told second may find the other gone


def body_uses_one_of_two() -> str:
    first, second = (nn.Linear(3, 1, bias=False) for _ in range(2))
    one, two = distributed(first), distributed(second)
    inputs = torch.ones(2, 3)
    loss = first(inputs).mean()
    if hora.rank() == 0:
        loss = loss + second(inputs).mean() * 10
    try:
        loss.backward()
        two.step()
        one.step()
    except Exception as error:
        return type(error).__name__
    return "nothing"


class Breaks(torch.autograd.Function):
    """Raises in backward as often as it is told to."""

    left = 0

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Breaks.left:
            Breaks.left -= 1
            raise MemoryError("planted")
        return gradient


@pytest.mark.parametrize("explicit", [False, True])
@run_ranks(1, 2)
def test_exception_in_the_last_backward_is_survived_alone_and_named_among_others(explicit: bool) -> None:
    first, second = nn.Linear(600, 600).to(hora.device()), nn.Linear(600, 600).to(hora.device())
    model = nn.Sequential(first, second)
    optimizer = distributed(model)
    inputs = torch.ones(2, 600, device=hora.device())

    def one_pass() -> None:
        if explicit:
            for _ in optimizer.micro_batches([None]):
                optimizer.backward(second(Breaks.apply(first(inputs))).sum(), weight=2)
        else:
            optimizer.zero_grad()
            second(Breaks.apply(first(inputs))).mean().backward()

    Breaks.left = 1
    with pytest.raises(MemoryError, match="planted"):
        one_pass()
    if hora.world_size() > 1:
        with pytest.raises(ConfigError, match="an exception has ended the last backward"):
            one_pass()
        return
    one_pass()
    found = first.weight.grad.clone()
    optimizer.step()
    one_pass()
    assert found.isfinite().all()
    assert found.any()


@run_ranks(1, 2)
def test_clearing_through_the_model_begins_a_new_window_in_the_middle_of_one() -> None:
    """The loop of PyTorch's DCGAN example: the generator's pass runs through the discriminator, whose gradients are cleared by itself."""
    generator, discriminator = nn.Linear(3, 4).to(hora.device()), nn.Linear(4, 1).to(hora.device())
    of_g = hora.DistributedOptimizer(torch.optim.SGD(generator.parameters(), 0.1), generator)
    of_d = hora.DistributedOptimizer(torch.optim.SGD(discriminator.parameters(), 0.1), discriminator, accumulation_steps=2)
    noise, real = torch.ones(2, 3, device=hora.device()), torch.ones(2, 4, device=hora.device())
    for _ in range(3):
        discriminator.zero_grad()
        fake = generator(noise)
        discriminator(real).mean().backward()
        (-discriminator(fake.detach()).mean()).backward()
        expected = real.mean(0, keepdim=True) - fake.detach().mean(0, keepdim=True)
        assert torch.allclose(discriminator.weight.grad, expected)
        of_d.step()
        generator.zero_grad()
        discriminator(generator(noise)).mean().backward()
        of_g.step()
