"""Gradients that are not finite change no parameter on any rank; replicas that have drifted apart are found, named and repaired."""

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import hora
from hora import Checks
from hora.errors import CollectiveMismatch, ConfigError, NonFiniteGradient, ReplicaMismatch
from hora.sync.finite import raise_by_norms, raise_by_sums
from hora.sync.replicas import bit_sum
from hora.testing import run_ranks

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(hora.device())


def micro_batches(step: int, count: int = 2) -> list[Tensor]:
    """The same for every number of ranks in what they sum to: this rank's share of rows that all ranks know."""
    rows = torch.randn(12 * count, 4, generator=torch.Generator().manual_seed(step)).to(hora.device())
    return [part[hora.rank() :: hora.world_size()] for part in rows.chunk(count)]


def bits(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def train(
    model: nn.Module, optimizer: hora.DistributedOptimizer, steps: range, spoil: Callable[[int, int, Tensor], Tensor]
) -> Iterator[int]:
    """One update after the other; yields behind each. `spoil(step, micro_step, loss)` may make a loss of this rank what it likes."""
    for step in steps:
        for micro_step, inputs in enumerate(optimizer.micro_batches(micro_batches(step))):
            optimizer.backward(spoil(step, micro_step, model(inputs).square().sum()), weight=len(inputs))
        optimizer.step()
        yield step


def spoilt_on_the_last_rank(step: int, micro_step: int, loss: Tensor) -> Tensor:
    bad = step == 3 and micro_step == 1 and hora.rank() == hora.world_size() - 1
    return loss * math.nan if bad else loss


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@run_ranks(1, 2, 3)
def test_update_that_is_not_finite_is_applied_nowhere_and_raised_everywhere(name: str) -> None:
    model = mlp()
    optimizer = hora.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), model)
    before: list[Tensor] = []
    reached = -1
    with pytest.raises(NonFiniteGradient) as caught:
        for step in train(model, optimizer, range(8), spoilt_on_the_last_rank):
            reached = step
            if step == 2:
                before = bits(model)
            if step == 3:
                assert same(bits(model), before)  # the device has left it out, the host does not know yet
    delayed = name.startswith("fused") and hora.device().type == "cuda"
    assert reached == (3 if delayed else 2)
    assert same(bits(model), before)
    assert optimizer.skipped_steps == 1
    last = hora.world_size() - 1
    assert str(caught.value).startswith(
        f"all gradients must be finite, but those of update 3 were not, on rank {last} first at micro-step 1, whose loss was not finite either, "
        "in '0.weight', '0.bias', '2.weight' and 1 more parameters. No rank applied it."
    )


@pytest.mark.parametrize("policy", ["skip", "warn"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@run_ranks(1, 2, 3)
def test_training_goes_on_as_if_the_update_had_not_been(name: str, policy: str) -> None:
    model, other = mlp(), mlp()
    optimizer = hora.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), model, checks=Checks(non_finite=policy))  # type: ignore[arg-type]
    list(train(model, optimizer, range(6), spoilt_on_the_last_rank))
    without = hora.DistributedOptimizer(OPTIMIZERS[name](other.parameters()), other)
    for steps in (range(3), range(4, 6)):
        list(train(other, without, steps, lambda step, micro_step, loss: loss))
    assert same(bits(model), bits(other))
    assert optimizer.skipped_steps == 1


@run_ranks(2, 3)
def test_parameter_and_rank_are_named_although_the_loss_is_finite() -> None:
    model = mlp()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), model)
    calls = []

    def spoil(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient + math.inf if hora.rank() == 1 and len(calls) == 3 else gradient  # update 1, micro-step 0

    model[2].bias.register_hook(spoil)
    with pytest.raises(NonFiniteGradient, match=r"those of update 1 were not, on rank 1 first at micro-step 0, in '2.bias'. No rank"):
        list(train(model, optimizer, range(3), lambda step, micro_step, loss: loss))


@run_ranks(1, 2)
def test_plain_backward_is_watched_too() -> None:
    model = mlp()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), model)
    before = bits(model)
    (model(micro_batches(0)[0]).sum() * (math.inf if hora.rank() == 0 else 1.0)).backward()
    with pytest.raises(NonFiniteGradient, match="those of update 0 were not, on rank 0 in '0.weight'"):
        optimizer.step()
    assert same(bits(model), before)


@run_ranks(2)
def test_sum_that_overflows_is_told_from_gradients_that_are_not_finite() -> None:
    model = nn.Linear(1, 1, bias=False).to(hora.device(), torch.float16)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), model)
    with pytest.raises(NonFiniteGradient, match="though each rank's own gradients were: their sum is too large for its type"):
        for inputs in optimizer.micro_batches([torch.full((1, 1), 6e4, device=hora.device(), dtype=torch.float16)]):
            optimizer.backward(model(inputs).sum(), weight=0.5)
        optimizer.step()


@run_ranks(2)
def test_large_gradients_of_a_rank_are_not_blamed_for_their_sum() -> None:
    model = nn.Linear(4, 1, bias=False).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), model)
    with pytest.raises(NonFiniteGradient, match="though each rank's own gradients were: their sum is too large for its type"):
        for inputs in optimizer.micro_batches([torch.full((1, 4), 1e38, device=hora.device())] * 3):
            optimizer.backward(model(inputs).sum(), weight=1 / 6)
        optimizer.step()


@run_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["overlap", "deferred", "sharded"])
def test_large_gradients_whose_mean_is_not_are_applied(strategy: str) -> None:
    """Too large to be looked at by their norm, and not too large."""
    model = nn.Linear(4, 1, bias=False).to(hora.device())
    nn.init.zeros_(model.weight)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-30, foreach=True), model, strategy=strategy)
    for inputs in optimizer.micro_batches([torch.full((1, 4), 1e30 * (1 + hora.rank()), device=hora.device())]):
        optimizer.backward(model(inputs).sum(), weight=1)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full_like(model.weight, -(1 + hora.world_size()) / 2))


@run_ranks(1, 2, 3)
def test_sparse_gradients_are_watched_too() -> None:
    model = nn.Embedding(9, 3, sparse=True).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), model)
    before = bits(model)
    last = hora.world_size() - 1
    with pytest.raises(NonFiniteGradient, match=f"on rank {last} first at micro-step 0, whose loss was not finite either, in 'weight'"):
        for rows in optimizer.micro_batches([torch.tensor([hora.rank(), 8], device=hora.device())]):
            optimizer.backward(model(rows).sum() * (math.nan if hora.rank() == last else 1.0), weight=2)
        optimizer.step()
    assert same(bits(model), before)


@run_ranks(1, 2)
def test_two_optimizers_of_a_model_both_leave_it_out() -> None:
    model = mlp()
    checks = Checks(non_finite="skip")
    halves = [list(model[0].parameters()), list(model[2].parameters())]
    optimizers = [hora.DistributedOptimizer(torch.optim.SGD(half, lr=0.1, foreach=True), model, checks=checks) for half in halves]
    before = bits(model)
    for inputs in optimizers[0].micro_batches(micro_batches(0)):
        optimizers[0].backward(model(inputs).sum() * math.nan, weight=len(inputs))
    for optimizer in optimizers:
        optimizer.step()
    assert same(bits(model), before)
    assert [optimizer.skipped_steps for optimizer in optimizers] == [1, 1]


@run_ranks(1, 2)
def test_what_the_device_has_left_out_is_reported_when_asked_for() -> None:
    """On a GPU that would be the next step's business; on a CPU it has been reported by then."""
    model = mlp()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.settle_checks()
    for inputs in optimizer.micro_batches(micro_batches(0)):
        optimizer.backward(model(inputs).sum() * math.nan, weight=len(inputs))
    with pytest.raises(NonFiniteGradient, match="those of update 0 were not"):
        optimizer.step()
        optimizer.settle_checks()
    optimizer.settle_checks()


@pytest.mark.parametrize("look", [raise_by_sums, raise_by_norms])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_way_to_look_tells_what_is_not_finite(look: Callable[[Tensor, list[Tensor]], None], dtype: torch.dtype) -> None:
    large = torch.full((500,), torch.finfo(dtype).max, dtype=dtype)
    for bad in (0.0, math.nan, math.inf, -math.inf):
        spoilt, flag = large.clone(), torch.zeros(())
        spoilt[77] = bad
        look(flag, [large, spoilt])
        assert flag.item() == (0.0 if bad == 0.0 else 1.0)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@run_ranks(1, 2)
def test_gradient_that_somebody_else_left_out_is_forgotten(name: str) -> None:
    """As GradScaler does: `step()` is not called for it."""
    model, other = mlp(), mlp()
    optimizer = hora.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), model)
    without = hora.DistributedOptimizer(OPTIMIZERS[name](other.parameters()), other)
    for step in range(9):
        bad = step in (2, 3, 6)
        for inputs in optimizer.micro_batches(micro_batches(step)):
            optimizer.backward(model(inputs).square().sum() * (math.nan if bad else 1.0), weight=len(inputs))
        if not bad:
            optimizer.step()
            list(train(other, without, range(step, step + 1), lambda step, micro_step, loss: loss))
    assert same(bits(model), bits(other))
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@run_ranks(1, 2)
def test_many_updates_in_a_row_are_left_out_and_others_are_not(name: str) -> None:
    model, other = mlp(), mlp()
    optimizer = hora.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), model, checks=Checks(non_finite="skip"))
    without = hora.DistributedOptimizer(OPTIMIZERS[name](other.parameters()), other)
    bad = (0, 1, 4, 5, 6, 9)
    list(train(model, optimizer, range(12), lambda step, micro_step, loss: loss * math.inf if step in bad else loss))
    for step in set(range(12)) - set(bad):
        list(train(other, without, range(step, step + 1), lambda step, micro_step, loss: loss))
    assert same(bits(model), bits(other))
    assert optimizer.skipped_steps == len(bad)


@run_ranks(1, 2)
def test_ignore_applies_it_and_large_gradients_are_finite() -> None:
    model = mlp()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, checks=Checks(non_finite="ignore"))
    list(train(model, optimizer, range(4), spoilt_on_the_last_rank))
    assert all(parameter.isnan().all() for parameter in model.parameters())
    large = nn.Linear(4, 1000, bias=False).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(large.parameters(), lr=1e-38), large)
    for inputs in optimizer.micro_batches([torch.full((1, 4), 1e37, device=hora.device())]):
        optimizer.backward(large(inputs).sum(), weight=1)  # their plain sum would be infinite
    optimizer.step()


def drifting(steps: int, **checks: object) -> nn.Module:
    """Trains; after update 3 a number of the last rank changes."""
    model = mlp()
    optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, checks=Checks(**checks))  # type: ignore[arg-type]
    for step in train(model, optimizer, range(steps), lambda step, micro_step, loss: loss):
        if step == 2 and hora.rank() == hora.world_size() - 1:
            with torch.no_grad():
                model[2].bias[1] += 0.25
    return model


@run_ranks(2, 3, 4)
def test_replica_that_drifted_is_named_at_the_next_check(world_size: int) -> None:
    last = world_size - 1
    others = {2: "rank 0", 3: "ranks 0 and 1", 4: "ranks 0, 1 and 2"}[world_size]
    with pytest.raises(ReplicaMismatch, match=rf"after update 4 rank {last} differs from {others}, first in '2.bias' \(1 of 4 tensors\)"):
        drifting(6, check_every=4)
    drifting(6, check_every=0)
    drifting(5, check_every=3)  # it drifts behind the check


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.complex64, torch.bool])
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5).to(dtype)
    before = bit_sum(tensor)
    flat = tensor.view(torch.uint8).view(-1) if dtype is not torch.complex64 else torch.view_as_real(tensor).view(torch.uint8).view(-1)
    for byte in range(flat.numel()):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert bit_sum(tensor) != before
            flat[byte] ^= 1 << bit
    assert bit_sum(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
@pytest.mark.parametrize("shape", [(0,), (), (7,), (4, 4), (3, 5)])
def test_sum_of_bits_does_not_depend_on_the_place_in_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 100, shape).to(dtype)
    shifted = torch.cat([torch.ones(1, dtype=dtype), tensor.reshape(-1)])[1:].view(shape)
    turned = tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() == 2 else tensor
    mirrored = tensor.conj().resolve_conj().conj()
    assert bit_sum(shifted) == bit_sum(turned) == bit_sum(mirrored) == bit_sum(tensor)


@run_ranks(3, 4)
def test_majority_repairs_the_odd_rank() -> None:
    model = drifting(7, check_every=4, repair=True)
    for parameter in model.parameters():
        first, *others = hora.all_gather(parameter.detach())
        assert all(torch.equal(first, other) for other in others)


@run_ranks(2)
def test_two_ranks_have_no_majority() -> None:
    with pytest.raises(ReplicaMismatch, match="rank 1 differs from rank 0"):
        drifting(5, check_every=4, repair=True)


@run_ranks(2, 3)
def test_frozen_parameters_are_compared_too() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model)
    with torch.no_grad():
        model[0].weight[0] += hora.rank() == 1
    with pytest.raises(ReplicaMismatch, match="first in '0.weight'"):
        optimizer.compare_replicas()


@run_ranks(2, 3)
def test_optimizers_that_differ_are_named_on_every_rank() -> None:
    model = mlp()
    odd = hora.rank() == 1
    kind = torch.optim.Adam if odd else torch.optim.SGD
    with pytest.raises(CollectiveMismatch, match="but it is SGD on rank 0 and Adam on rank 1"):
        hora.DistributedOptimizer(kind(model.parameters(), lr=0.1), model)
    halves = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "weight_decay": 0.1}]
    named = r"but group 0 is 0.weight, 0.bias on rank 0 and 2.weight, 2.bias on rank 1"
    with pytest.raises(CollectiveMismatch, match=named):
        hora.DistributedOptimizer(torch.optim.SGD(halves[::-1] if odd else halves, lr=0.1), model)
    with pytest.raises(CollectiveMismatch, match="but group 1 is 2.weight, 2.bias on rank 0 and absent on rank 1"):
        hora.DistributedOptimizer(torch.optim.SGD(halves[:1] if odd else halves, lr=0.1), model)


@run_ranks(2)
def test_ranks_that_check_differently_are_refused() -> None:
    model = mlp()
    with pytest.raises(CollectiveMismatch, match=r"rank 0 has SyncSettings\(.*check_every=0.* and rank 1 SyncSettings\(.*check_every=1"):
        hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, checks=Checks(check_every=hora.rank()))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"non_finite": "stop"}, "non_finite must be one of"),
        ({"check_every": -1}, "check_every must be"),
        ({"check_every": 1.5}, r"check_every must be 0 \(never\) or a greater whole number, but is 1.5"),
        ({"repair": "yes"}, "repair must be True or False, but is 'yes'"),
    ],
)
def test_wrong_checks_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Checks(**values)  # type: ignore[arg-type]


@run_ranks(1, 2)
def test_open_choice_of_an_implementation_is_fused_on_a_gpu_and_a_made_one_kept() -> None:
    on_gpu = hora.device().type == "cuda"
    for asked, fused in (({}, on_gpu or None), ({"foreach": True}, None), ({"fused": False}, False), ({"fused": True}, True)):
        model = mlp()
        optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1, **asked), model)
        assert [group["fused"] for group in optimizer.param_groups] == [fused]
    used = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    used.step()  # its state is that of the other implementation
    assert hora.DistributedOptimizer(used, model).param_groups[0]["fused"] is None


@run_ranks(1)
def test_wrapped_optimizer_keeps_nothing_of_the_check() -> None:
    model = mlp()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer = hora.DistributedOptimizer(plain, model)
    list(train(model, optimizer, range(2), lambda step, micro_step, loss: loss))
    assert not {"found_inf", "grad_scale"} & set(vars(plain))
    copy.deepcopy(plain.state_dict())


@run_ranks(1)
def test_gradients_of_an_update_that_is_settled_are_kept_no_longer():
    model = nn.Linear(2, 2).to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    model(torch.ones(1, 2, device=hora.device())).sum().backward()
    optimizer.step()
    finite = optimizer.synchronizer.finite
    finite._pending = finite._verdict  # as on a GPU, where the next update settles it
    finite._verdict.marks.append({0: model.weight.grad})
    optimizer.settle_checks()
    assert finite._verdict.marks == []
