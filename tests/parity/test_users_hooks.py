"""Hooks of users on parameters, and what else autograd can do to a gradient: `overlap` gives what `deferred` gives, on every rank."""

import copy
import threading
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hora
from hora.sync import gradients as buckets
from hora.testing import run_ranks


def double(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


def replace(parameter: Tensor) -> None:
    parameter.grad = parameter.grad.clamp(-0.5, 0.5)


def drop(parameter: Tensor) -> None:
    if parameter.dim() == 1:
        parameter.grad = None


HOOKS: dict[str, Callable[[Tensor], None]] = {"double": double, "replace": replace, "drop": drop}


class Twice(nn.Module):
    """One layer in two parts that are computed anew in backward, by which its gradient comes in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[0](inputs)
        for layer in (self.layers[1], self.layers[2], self.layers[1]):
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        return hidden


def gradients(
    model: nn.Module,
    strategy: str,
    *,
    explicit: bool,
    hook: str | None = None,
    before: bool = False,
    create_graph: bool = False,
    bucket_cap_bytes: int = 200,
    taken: str = "one by one",
) -> list[Tensor | None]:
    model = copy.deepcopy(model).to(hora.device())

    def register() -> None:
        for parameter in model.parameters() if hook else ():
            parameter.register_post_accumulate_grad_hook(HOOKS[hook or ""])

    if before:
        register()
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, strategy=strategy, bucket_cap_bytes=bucket_cap_bytes
    )
    if taken == "when the bucket is full":  # as on a GPU
        optimizer.synchronizer._sums._sums.takes_early = False
    if not before:
        register()
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(hora.rank())).to(hora.device())
    with mock.patch.object(buckets, "_SMALL_BYTES", -1 if taken == "one by one" else buckets._SMALL_BYTES):
        for _ in range(2):
            if explicit:
                for batch in optimizer.micro_batches([inputs[:2], inputs[2:]]):
                    optimizer.backward(model(batch).square().sum(), weight=len(batch))
            else:
                optimizer.zero_grad()
                model(inputs).square().sum().backward(create_graph=create_graph)
            optimizer.step()
    return [None if parameter.grad is None else parameter.grad.detach().cpu() for parameter in model.parameters()]


def assert_same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    assert [gradient is None for gradient in ours] == [gradient is None for gradient in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
            everybody = hora.all_gather(mine[None].to(hora.device()))
            assert all(torch.equal(part, everybody[0]) for part in everybody)


def model_of_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


@run_ranks(2)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("taken", ["one by one", "together", "when the bucket is full"])
def test_hooks_see_and_change_this_ranks_own_gradient_whenever_they_were_registered(
    world_size: int, hook: str, explicit: bool, taken: str
) -> None:
    for before in (False, True):
        expected = gradients(model_of_layers(), "deferred", explicit=explicit, hook=hook, before=before)
        found = gradients(model_of_layers(), "overlap", explicit=explicit, hook=hook, before=before, taken=taken)
        assert_same(found, expected)


@run_ranks(2, 3)
def test_a_layer_in_two_recomputed_parts(world_size: int) -> None:
    torch.manual_seed(0)
    model = Twice()
    ours, theirs = (gradients(model, strategy, explicit=True, bucket_cap_bytes=2**20) for strategy in ("overlap", "deferred"))
    assert_same(ours, theirs)


@run_ranks(2)
def test_backward_that_makes_a_graph_of_itself(world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the cycle between parameter and gradient
        ours = gradients(model_of_layers(), "overlap", explicit=False, create_graph=True)
        theirs = gradients(model_of_layers(), "deferred", explicit=False, create_graph=True)
    assert_same(ours, theirs)


@run_ranks(1, 2)
@pytest.mark.parametrize("strategy", ["overlap", "deferred"])
def test_a_gradient_that_a_hook_replaces_is_not_taken_for_one_that_was_cleared(world_size: int, strategy: str) -> None:
    """The hook is registered on one rank only, which would go on counting its passes otherwise than the others."""
    model = model_of_layers().to(hora.device())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy=strategy, accumulation_steps=2)
    for parameter in model.parameters() if hora.rank() == 0 else ():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", parameter.grad.clone()))
    for _ in range(2):
        model(torch.ones(4, 6, device=hora.device())).square().sum().backward()
    assert optimizer.synchronizer.completed == 1


@run_ranks(1, 2)
def test_hooks_run_in_the_thread_that_calls_backward(world_size: int) -> None:
    """Whether it may be handed over tells on a CPU too, where it is not; what the script has chosen is in force again behind it."""
    model, found = model_of_layers().to(hora.device()), set[tuple[int, bool]]()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    may_hand_over = torch._C._is_multithreading_enabled
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: found.add((threading.get_ident(), may_hand_over())))
    for chosen in (True, False):
        with torch.autograd.set_multithreading_enabled(chosen):
            for batch in optimizer.micro_batches([torch.ones(4, 6, device=hora.device())]):
                optimizer.backward(model(batch).square().sum(), weight=len(batch))
            assert may_hand_over() is chosen
        optimizer.step()
    assert found == {(threading.get_ident(), False)}
