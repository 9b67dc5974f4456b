"""Ranks that make different calls are told so, all of them, before any data moves, and can go on.

The nine cases are those in which Gloo, left to itself, computes wrong numbers, aborts or waits for its deadline.
"""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hora
from hora import ReduceOp
from hora.errors import CollectiveMismatch
from hora.testing import run_ranks


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device=hora.device())


def reduce_in(order: tuple[str, str]) -> None:
    parts = {"loss": tensor(3), "accuracy": tensor(3)}
    for name in order:
        hora.all_reduce(parts[name], name=name)


# What rank 1 does, what the others do, and what is said of both.
Case = tuple[Callable[[], object], Callable[[], object], str, str]
CASES: dict[str, Case] = {
    "shape": (
        lambda: hora.all_reduce(tensor(4, 5)),
        lambda: hora.all_reduce(tensor(2, 3)),
        r"all_reduce float32 \[4, 5\] sum",
        r"all_reduce float32 \[2, 3\] sum",
    ),
    "one more element": (
        lambda: hora.all_reduce(tensor(101)),
        lambda: hora.all_reduce(tensor(100)),
        r"float32 \[101\]",
        r"float32 \[100\]",
    ),
    "another view": (
        lambda: hora.all_reduce(tensor(3, 2)),
        lambda: hora.all_reduce(tensor(2, 3)),
        r"float32 \[3, 2\]",
        r"float32 \[2, 3\]",
    ),
    "dtype": (
        lambda: hora.all_reduce(tensor(4, dtype=torch.int32)),
        lambda: hora.all_reduce(tensor(4)),
        r"int32 \[4\]",
        r"float32 \[4\]",
    ),
    "dtype of a broadcast": (
        lambda: hora.broadcast(tensor(50, dtype=torch.float64)),
        lambda: hora.broadcast(tensor(100)),
        r"broadcast float64 \[50\] from rank 0",
        r"broadcast float32 \[100\] from rank 0",
    ),
    "op": (
        lambda: hora.all_reduce(tensor(4), ReduceOp.MAX),
        lambda: hora.all_reduce(tensor(4)),
        r"float32 \[4\] max",
        r"float32 \[4\] sum",
    ),
    "kind": (
        lambda: hora.broadcast(tensor(4)),
        lambda: hora.all_reduce(tensor(4)),
        r"broadcast float32 \[4\] from rank 0",
        r"all_reduce float32 \[4\] sum",
    ),
    "order": (
        lambda: reduce_in(("accuracy", "loss")),
        lambda: reduce_in(("loss", "accuracy")),
        r"'accuracy' at .*test_same_call.py:\d+",
        r"'loss' at .*test_same_call.py:\d+",
    ),
    "count": (hora.barrier, lambda: hora.all_reduce(tensor(4)), "barrier", r"all_reduce float32 \[4\] sum"),
    # and others
    "source": (lambda: hora.broadcast(tensor(4), 1), lambda: hora.broadcast(tensor(4), 0), "from rank 1", "from rank 0"),
    "algorithm": (
        lambda: hora.all_reduce(tensor(4), algorithm="ordered"),
        lambda: hora.all_reduce(tensor(4)),
        "sum ordered",
        "sum native",
    ),
    "a broken promise of one shape": (
        lambda: hora.all_gather(tensor(5), same_shape=True),
        lambda: hora.all_gather(tensor(4), same_shape=True),
        r"all_gather float32 \[5\]",
        r"all_gather float32 \[4\]",
    ),
    "an object": (lambda: hora.all_gather_object(1), lambda: hora.broadcast_object(1), "all_gather uint8", "broadcast int64"),
    "scattered": (
        lambda: hora.reduce_scatter(tensor(8), ReduceOp.MAX),
        lambda: hora.reduce_scatter(tensor(8)),
        r"\[8\] max",
        r"\[8\] sum",
    ),
    "begun": (
        lambda: hora.all_reduce(tensor(5), async_op=True),
        lambda: hora.all_reduce(tensor(4), async_op=True),
        r"\[5\] sum",
        r"\[4\] sum",
    ),
}


@pytest.mark.parametrize("case", list(CASES))
@run_ranks(2, 3, 4)
def test_different_calls_are_named_on_every_rank(world_size: int, case: str) -> None:
    on_rank_one, elsewhere, said_by_rank_one, said_elsewhere = CASES[case]
    others = {2: "rank 0 is", 3: "ranks 0 and 2 are", 4: "ranks 0, 2 and 3 are"}[world_size]
    with pytest.raises(CollectiveMismatch, match=f"{others} about to [^;]*{said_elsewhere}.*; rank 1 is about to [^;]*{said_by_rank_one}"):
        (on_rank_one if hora.rank() == 1 else elsewhere)()
    # Nothing is left in the air: the next call is everybody's.
    assert hora.all_reduce(tensor(7)).tolist() == [world_size] * 7


def trained(model: nn.Module, strategy: str = "overlap") -> tuple[nn.Module, hora.DistributedOptimizer]:
    model = model.to(hora.device())
    return model, hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy=strategy)


def last_backward(model: nn.Module, optimizer: hora.DistributedOptimizer) -> None:
    for inputs in optimizer.micro_batches([tensor(2, 4)]):
        optimizer.backward(model(inputs).sum(), weight=2)


@pytest.mark.parametrize("strategy", ["overlap", "deferred"])
@run_ranks(2, 3)
def test_models_of_different_shapes_summed_in_another_order_are_named(strategy: str) -> None:
    models = [nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 2)).to(hora.device()), nn.Linear(4, 1).to(hora.device())]
    optimizers = [hora.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m, strategy=strategy) for m in models]
    pairs = list(zip(models, optimizers, strict=True))
    named = r"sum update 0 of model \d+ \(weight, bias\)(.|\n)*\(0.weight, 0.bias, 2.weight and 1 more parameters\)"
    swapped = r"\(0.weight, 0.bias, 2.weight and 1 more parameters\)(.|\n)*sum update 0 of model \d+ \(weight, bias\)"
    with pytest.raises(CollectiveMismatch, match=f"({named})|({swapped})"):
        for pair in pairs if hora.rank() == 0 else reversed(pairs):
            last_backward(*pair)


@run_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["overlap", "deferred"])
def test_update_on_some_ranks_and_a_call_on_others_are_named(strategy: str) -> None:
    model, optimizer = trained(nn.Linear(4, 1), strategy=strategy)
    with pytest.raises(CollectiveMismatch, match=r"rank 1 is about to all_reduce float32 \[1\] sum") as caught:
        if hora.rank() == 1:
            hora.all_reduce(tensor(1))
        else:
            last_backward(model, optimizer)
    assert re.search(r"about to sum update 0 of model \d+ \(weight, bias\) at .*test_same_call.py:\d+", str(caught.value))


@run_ranks(2, 3)
def test_rank_that_skips_an_update_is_named() -> None:
    model, optimizer = trained(nn.Linear(4, 1))
    last_backward(model, optimizer)
    optimizer.step()
    with pytest.raises(CollectiveMismatch, match=r"sum update 1 of model \d+ \(weight, bias\)"):
        if hora.rank() == 0:
            hora.sync_buffers(nn.BatchNorm1d(2).to(hora.device()))
        else:
            last_backward(model, optimizer)


@run_ranks(2)
def test_plain_backward_agrees_too() -> None:
    first, first_optimizer = trained(nn.Linear(4, 1))
    second, second_optimizer = trained(nn.Linear(4, 3))
    with pytest.raises(CollectiveMismatch, match=r"sum update 0 of model"):
        (first if hora.rank() == 0 else second)(tensor(2, 4)).sum().backward()
        (first_optimizer if hora.rank() == 0 else second_optimizer).step()
