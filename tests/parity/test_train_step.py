"""`TrainStep`: one call a step gives what a loop gives, on any number of ranks; graphs are tested on GPUs (tests/gpu)."""

import random
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hora
from hora.errors import CheckpointMismatch, CollectiveMismatch, ConfigError, NonFiniteGradient
from hora.testing import run_ranks
from hora.train.step import compiling
from hora.train.step.fitting import OutOfMemory
from hora.train.step.graph import carry_states
from hora.train.step.rates import LearningRates
from hora.train.step.tree import UnknownContent, map_tensors, signature, tensors_of

SAMPLES = 12


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


@dataclass
class Held:
    values: torch.Tensor
    count: int


class Hidden:
    tensor = torch.zeros(1)


def perceptron(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def samples(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch(torch.randn(SAMPLES, 4, generator=generator), torch.randint(3, (SAMPLES,), generator=generator))


def classify(model, batch, state):
    logits = model(batch.inputs)
    correct = (logits.argmax(1) == batch.targets).sum()
    return F.cross_entropy(logits, batch.targets, reduction="sum"), len(batch.targets), {"correct": correct, "batches": 1}, state


def shares(step: int, world_size: int, num_micro: int) -> list[Batch]:
    """This rank's micro-batches, of unequal sizes."""
    whole = samples(step)
    mine = [tensor.tensor_split(world_size)[hora.rank()].tensor_split(num_micro) for tensor in whole]
    return [Batch(*parts) for parts in zip(*mine, strict=True)]


def train_alone(num_steps: int, clip_norm: float | None) -> tuple[nn.Module, list[float], int]:
    model, losses, correct = perceptron(), [], 0
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(num_steps):
        batch = samples(step)
        loss, weight, metrics, _ = classify(model, batch, None)
        optimizer.zero_grad()
        (loss / weight).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item() / weight)
        correct += int(metrics["correct"])
    return model, losses, correct


@run_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_steps_give_what_one_process_gives(world_size, wrapped, clip_norm):
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train_step = hora.TrainStep(model, classify, hora.DistributedOptimizer(optimizer, model) if wrapped else optimizer, clip_norm=clip_norm)
    results = [train_step(shares(step, world_size, num_micro=1 + step % 2)) for step in range(4)]
    expected, losses, correct = train_alone(4, clip_norm)
    assert [result.loss.item() for result in results] == pytest.approx(losses, rel=1e-5)
    assert sum(int(result.metrics["correct"]) for result in results) == correct
    assert [(int(result.weight), int(result.metrics["batches"])) for result in results] == [
        (SAMPLES, world_size * (1 + step % 2)) for step in range(4)
    ]
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert (train_step.num_replayed, train_step.eager_because) == (0, "CUDA graphs are for GPUs")


@run_ranks(1, 2)
def test_a_model_compiled_in_parts_gives_it_too(world_size):
    model = perceptron()
    with mock.patch.object(compiling, "in_parts", partial(compiling.in_parts, backend="aot_eager")), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.11 warns inside its own compiler on Python 3.12
        train_step = hora.TrainStep(model, classify, torch.optim.AdamW(model.parameters(), 0.01), compile="parts")
        results = [train_step(shares(step, world_size, num_micro=1)) for step in range(3)]
    torch.compiler.reset()
    expected, losses, _ = train_alone(3, None)
    assert [result.loss.item() for result in results] == pytest.approx(losses, rel=1e-5)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@run_ranks(2, 3)
def test_a_rank_without_micro_batches_takes_part_from_the_first_step_on(world_size):
    train_step = hora.TrainStep(model := perceptron(), classify, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        mine = [samples(step)] if hora.rank() == 1 else []
        result = train_step(mine)
        assert (int(result.weight), set(result.metrics)) == (SAMPLES, {"correct", "batches"})
    parameters = hora.all_gather(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert all(torch.equal(part, parameters[0]) for part in parameters)


@run_ranks(2)
def test_a_step_without_any_sample_changes_nothing(world_size):
    train_step = hora.TrainStep(model := perceptron(), classify, torch.optim.SGD(model.parameters(), 0.1))
    before = [parameter.clone() for parameter in model.parameters()]
    result = train_step([])
    assert (int(result.weight), result.metrics, bool(result.loss.isnan())) == (0, {}, True)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert int(train_step([samples(0)]).weight) == SAMPLES * world_size


@run_ranks(1, 2)
def test_states_go_from_step_to_step_by_micro_batch(world_size):
    def count(model, batch, state):
        steps = torch.zeros(()) if state is None else state["steps"][0]
        loss, weight, _, _ = classify(model, batch, None)
        return loss, weight, {"steps": steps}, {"steps": (steps + 1,), "name": "mine"}

    train_step = hora.TrainStep(model := perceptron(), count, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        assert int(train_step(shares(step, world_size, 2)).metrics["steps"]) == 2 * world_size * step
    assert [(state["steps"][0].item(), state["name"]) for state in train_step.states] == [(3.0, "mine")] * 2
    train_step.states = []
    assert int(train_step(shares(3, world_size, 2)).metrics["steps"]) == 0


@run_ranks(2)
def test_bfloat16_computes_in_bfloat16_and_keeps_float32(world_size):
    seen = set()

    def watch(model, batch, state):
        seen.add(model(batch.inputs).dtype)
        return classify(model, batch, state)

    model = perceptron()
    train_step = hora.TrainStep(model, watch, torch.optim.SGD(model.parameters(), 0.1), precision="bfloat16")
    train_step(shares(0, world_size, 1))
    assert seen == {torch.bfloat16}
    assert {(parameter.dtype, parameter.grad.dtype) for parameter in model.parameters()} == {(torch.float32, torch.float32)}


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", ["overlap", "deferred", "sharded"])
def test_float16_scales_the_loss_and_takes_it_out_again(world_size, strategy):
    """Gradients that float16 cannot hold, for they are below its least number, come through; the scale is the same on all ranks."""
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)

    def tiny(model, batch, state):
        return (model(batch.inputs).float() * 1e-9).sum(), len(batch.targets), {}, state

    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model, strategy=strategy)
    train_step = hora.TrainStep(model, tiny, optimizer, precision="float16")
    for step in range(2):
        train_step(shares(step, world_size, 2))
    expected = -1e-9 * sum(samples(step).inputs.sum(0) for step in range(2)) / SAMPLES
    for row in model.weight.detach():
        torch.testing.assert_close(row, expected, rtol=0.02, atol=1e-12)
    assert (train_step.loss_scale.item(), optimizer.skipped_steps) == (2.0**16, 0)


@run_ranks(1, 2)
def test_a_scale_that_is_too_large_sinks_until_updates_get_through(world_size):
    """Overflow on one rank leaves the update out on all of them, is no error, and the scale can be kept."""

    def classify_large(model, batch, state):
        logits = model(batch.inputs)
        return logits.float().sum() * (8.0 if hora.rank() == 0 else 1e-3), 1, {}, state

    model = nn.Linear(4, 3)
    train_step = hora.TrainStep(model, classify_large, torch.optim.SGD(model.parameters(), 1e-3), precision="float16")
    before = model.weight.clone()
    batch = Batch(torch.ones(8, 4), torch.zeros(8))
    train_step([batch])
    assert torch.equal(model.weight, before)
    assert train_step.loss_scale == 2.0**15
    for _ in range(30):
        train_step([batch])
    scale, skipped = train_step.loss_scale.item(), train_step.optimizer.skipped_steps
    assert 2.0**16 * 0.5**skipped == scale == 2.0**9
    assert hora.all_gather_object(scale) == [scale] * world_size
    assert not torch.equal(model.weight, before)

    state = train_step.state_dict()
    again = hora.TrainStep(other := perceptron(), classify, torch.optim.SGD(other.parameters(), 0.1), precision="float16")
    again.load_state_dict(state)
    assert (again.state_dict(), again.loss_scale.item()) == (state, scale)
    with pytest.raises(CheckpointMismatch, match="scale and good_updates"):
        again.load_state_dict({"loss_scale": {"scale": 0.0}})


@run_ranks(2)
def test_a_loss_that_is_not_finite_is_no_matter_of_its_scale(world_size):
    def spoil(model, batch, state):
        loss, weight, metrics, state = classify(model, batch, state)
        return loss * (float("nan") if hora.rank() == 1 else 1.0), weight, metrics, state

    train_step = hora.TrainStep(model := perceptron(), spoil, torch.optim.SGD(model.parameters(), 0.1), precision="float16")
    with pytest.raises(NonFiniteGradient, match="on rank 1 first at micro-step 0, whose loss was not finite either"):
        train_step(shares(0, world_size, 1))


@run_ranks(2)
def test_a_weight_of_zero_is_no_matter_of_the_scale(world_size):
    def weigh(model, batch, state):
        loss, _, metrics, state = classify(model, batch, state)
        return loss, 0.0, metrics, state

    train_step = hora.TrainStep(model := perceptron(), weigh, torch.optim.SGD(model.parameters(), 0.1), precision="float16")
    with pytest.raises(NonFiniteGradient, match="those of update 0 were not"):
        train_step(shares(0, world_size, 1))
    assert train_step.loss_scale == 2.0**16


@run_ranks(2)
def test_gradients_that_no_scale_mends_are_told_at_the_least_one(world_size):
    def spoil(model, batch, state):
        loss, weight, metrics, state = classify(model, batch, state)
        model[0].weight.register_hook(lambda gradient: gradient * float("nan"))
        return loss, weight, metrics, state

    train_step = hora.TrainStep(model := perceptron(), spoil, torch.optim.SGD(model.parameters(), 0.1), precision="float16")
    with pytest.raises(NonFiniteGradient, match=r"in '0.weight'"):
        for step in range(40):
            train_step(shares(step, world_size, 1))
    assert (train_step.loss_scale.item(), train_step.optimizer.skipped_steps) == (2.0**-14, 30)


def short_of_memory(rank: int, most: int):
    """`classify` with dropout of its own, on a rank whose memory holds so many samples."""

    def loss_fn(model, batch, state):
        if hora.rank() == rank and len(batch.targets) > most:
            raise torch.OutOfMemoryError("planted")
        return classify(model, batch, state)

    return loss_fn


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", ["overlap", "sharded"])
def test_micro_batches_are_cut_on_all_ranks_until_they_fit_on_each(world_size, strategy):
    """And the model is the one of the whole batch; what is tried leaves no trace in buffers, generators and gradients."""

    def train(loss_fn, micro_batch_size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        model.register_buffer("runs", torch.zeros(()))
        model.register_forward_hook(lambda module, *_: module.runs.add_(1) and None)
        optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.01), model, strategy=strategy)
        train_step = hora.TrainStep(model, loss_fn, optimizer, micro_batch_size=micro_batch_size)
        results = [train_step(shares(step, world_size, 1 + (step == 2))) for step in range(4)]
        return model, results, train_step, torch.random.get_rng_state()

    model, results, train_step, generator = train(short_of_memory(world_size - 1, most=1), "auto")
    expected, whole, _, untouched = train(classify, None)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert [result.loss.item() for result in results] == pytest.approx([result.loss.item() for result in whole], rel=1e-5)
    assert [int(result.weight) for result in results] == [SAMPLES] * 4
    assert (train_step.micro_batch_size, train_step.state_dict()) == (1, {"micro_batch_size": 1})
    assert model.runs == 4 * len(shares(0, world_size, 1)[0].targets)
    assert torch.equal(generator, untouched)


@run_ranks(2)
def test_one_sample_that_does_not_fit_is_an_error_on_all_ranks(world_size):
    train_step = hora.TrainStep(
        model := perceptron(), short_of_memory(1, most=0), torch.optim.SGD(model.parameters(), 0.1), micro_batch_size="auto"
    )
    with pytest.raises(OutOfMemory, match="on rank 1 not even one does"):
        train_step(shares(0, world_size, 1))


@run_ranks(2)
def test_larger_micro_batches_are_tried_when_they_come_and_ranks_may_have_none(world_size):
    train_step = hora.TrainStep(
        model := perceptron(), short_of_memory(0, most=3), torch.optim.SGD(model.parameters(), 0.1), micro_batch_size="auto"
    )
    for size, most in ((2, None), (3, None), (8, 2), (3, 2)):
        mine = [Batch(*(tensor[:size] for tensor in samples(0)))] if hora.rank() == 0 else []
        assert int(train_step(mine).weight) == size
        assert train_step.micro_batch_size == most
    with pytest.raises(ConfigError, match="but these are \\[3, 4\\] long"):
        train_step([(torch.zeros(3), torch.zeros(4))])  # to be cut now


@run_ranks(1)
def test_what_is_never_cut_may_have_any_shape_and_models_that_communicate_are_refused(world_size):
    def weigh(model, batch, state):
        return classify(model, Batch(*batch[:2]), state)

    train_step = hora.TrainStep(model := perceptron(), weigh, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size="auto")
    assert int(train_step([(*samples(0), torch.ones(3))]).weight) == SAMPLES
    model = hora.convert_sync_batch_norm(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    with pytest.raises(ConfigError, match="has a SyncBatchNorm"):
        hora.TrainStep(model, classify, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size="auto")


@run_ranks(1)
def test_random_numbers_of_the_loop_are_not_drawn_by_what_is_tried(world_size):
    drawn = []

    def draw(model, batch, state):
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        loss, weight, _, state = classify(model, batch, state)
        return loss, weight, {"drawn": np.float32(drawn[-1][0]), "count": np.int64(2)}, state

    train_step = hora.TrainStep(model := perceptron(), draw, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size="auto")
    result = train_step([samples(0)])
    tried, used = drawn
    assert tried == used
    assert (result.metrics["drawn"].item(), result.metrics["count"].item()) == (float(np.float32(used[0])), 2.0)


@run_ranks(1)
def test_states_go_with_a_micro_batch_that_is_not_cut(world_size):
    def count(model, batch, state):
        loss, weight, metrics, _ = short_of_memory(0, most=4)(model, batch, None)
        return loss, weight, metrics, torch.zeros(len(batch.targets))

    train_step = hora.TrainStep(model := perceptron(), count, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size="auto")
    for _ in range(2):
        train_step([samples(0)])
    assert [len(state) for state in train_step.states] == [3] * 4
    train_step._fitting.most_samples = None
    train_step._fitting._tried = 0
    with pytest.raises(ConfigError, match="12 samples does not fit on rank 0, and cannot be cut while its state is carried"):
        train_step([samples(0)])


@run_ranks(2)
def test_ranks_with_different_precisions_are_told_so(world_size):
    model = perceptron()
    with pytest.raises(CollectiveMismatch, match="precision is 'float32' on rank 0 and 'float16' on rank 1"):
        hora.TrainStep(model, classify, torch.optim.SGD(model.parameters(), 0.1), precision=["float32", "float16"][hora.rank()])


@run_ranks(2)
def test_weights_may_be_tensors(world_size):
    def weigh(model, batch, state):
        loss, weight, metrics, state = classify(model, batch, state)
        return loss, torch.tensor(float(weight)), metrics, state

    model, again = perceptron(), perceptron()
    train_step = hora.TrainStep(model, weigh, torch.optim.SGD(model.parameters(), 0.1))
    other = hora.TrainStep(again, classify, torch.optim.SGD(again.parameters(), 0.1))
    for step in range(2):
        first, second = train_step(shares(step, world_size, 2)), other(shares(step, world_size, 2))
        assert (first.loss.item(), first.weight.item()) == (second.loss.item(), second.weight.item())
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


def body_exact(num_steps: int) -> list:
    data = torch.utils.data.TensorDataset(*samples(0))
    model = perceptron(dropout=0.3).to(hora.device())
    loader = hora.DataLoader(data, global_batch_size=SAMPLES, micro_batch_size=1, seed=3)

    def loss_fn(model, batch, state):
        return classify(model, Batch(*batch), state)

    train_step = hora.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), clip_norm=1.0)
    results = [train_step(step) for _ in range(num_steps) for step in loader]
    return [[result.loss.item().hex() for result in results], [parameter.double().sum().item().hex() for parameter in model.parameters()]]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exact_mode_has_the_same_bits(spawn_ranks, world_size):
    alone = spawn_ranks(1, body_exact, init={"exact": True}, num_steps=3).wait(60.0)
    among = spawn_ranks(world_size, body_exact, init={"exact": True}, num_steps=3).wait(60.0)
    assert alone[0].result is not None, alone
    assert [outcome.result for outcome in among] == [alone[0].result] * world_size


@run_ranks(2)
def test_a_gradient_that_is_not_finite_is_applied_nowhere(world_size):
    model = perceptron()
    train_step = hora.TrainStep(model, classify, torch.optim.SGD(model.parameters(), 0.1))
    before = [parameter.clone() for parameter in model.parameters()]
    batch = samples(0)
    if hora.rank() == 1:
        batch.inputs[0] = float("nan")
    with pytest.raises(NonFiniteGradient, match="on rank 1 first at micro-step 0"):
        train_step([batch])
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@run_ranks(2)
def test_ranks_with_other_metrics_are_told(world_size):
    def loss_fn(model, batch, state):
        loss, weight, _, state = classify(model, batch, state)
        return loss, weight, {f"of {hora.rank()}": 1.0}, state

    train_step = hora.TrainStep(model := perceptron(), loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match=r"the same metrics on all ranks, but returned \['of 0'\] and \['of 1'\]"):
        train_step([samples(0)])


@run_ranks(2)
def test_a_rank_that_calls_something_else_is_told(world_size):
    train_step = hora.TrainStep(model := perceptron(), classify, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(CollectiveMismatch):
        if hora.rank() == 0:
            train_step([samples(0)])
        else:
            hora.all_reduce(torch.ones(1))


@run_ranks(1)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"precision": "half"}, "unknown precision 'half'; choose one of: float32, bfloat16"),
        ({"capture": True}, 'capture must be "auto" or False, but is True'),
        ({"clip_norm": 0.0}, "clip_norm must be greater than 0"),
        ({"loss_fn": "classify"}, "loss_fn must be a function, but is a str"),
    ],
)
def test_mistakes_in_arguments_are_refused(world_size, change, problem):
    model = perceptron()
    with pytest.raises(ConfigError, match=problem):
        hora.TrainStep(model, **{"loss_fn": classify, "optimizer": torch.optim.SGD(model.parameters(), 0.1), **change})


@run_ranks(1)
def test_mistakes_in_what_loss_fn_returns_are_refused(world_size):
    model = perceptron()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for returned, problem in [
        (torch.ones(()), "but it returned Tensor"),
        ((torch.ones(()), 1), "but it returned tuple of 2"),
        ((torch.ones((), requires_grad=True), None, {}, None), "weight must be a number or a tensor with one element, but is None"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            hora.TrainStep(model, lambda *_, returned=returned: returned, optimizer)([samples(0)])

    names = iter(["a", "b"])
    changing = hora.TrainStep(model, lambda model, batch, state: (*classify(model, batch, state)[:2], {next(names): 1}, None), optimizer)
    with pytest.raises(ConfigError, match=r"the same metrics for each micro-batch, but returned \['b'\] after \['a'\]"):
        changing([samples(0), samples(1)])


def test_trees_keep_their_nesting_and_tell_shapes_apart():
    tree = {"a": (torch.zeros(2), [torch.ones(1), "word"]), "b": Batch(torch.zeros(1), torch.ones(3))}
    doubled = map_tensors(lambda tensor: tensor * 2, tree)
    assert type(doubled["b"]) is Batch
    assert (len(tensors_of(tree)), doubled["a"][1]) == (4, [torch.tensor([2.0]), "word"])
    assert signature(tree) == signature(doubled)
    assert hash(signature(tree)) == hash(signature(doubled))
    assert (
        signature(Held(torch.zeros(1), 2))
        == signature(map_tensors(torch.clone, Held(torch.ones(1), 2)))
        != signature(Held(torch.zeros(1), 3))
    )
    with pytest.raises(UnknownContent, match="a batch or state holds a Hidden"):
        signature([Hidden()])
    others = [{**tree, "a": (torch.zeros(3), tree["a"][1])}, {**tree, "c": 1}, {**tree, "b": (torch.zeros(1), torch.ones(3))}]
    assert all(signature(other) != signature(tree) for other in others)


def test_rates_are_lent_and_put_back():
    optimizer = torch.optim.Adam([{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], "lr": 0.5}], lr=0.25)
    rates = LearningRates(optimizer, torch.device("cpu"))
    with rates.lent(to_capture=True):
        lent = [group["lr"] for group in optimizer.param_groups]
        assert ([rate.item() for rate in lent], optimizer.param_groups[0]["capturable"]) == ([0.25, 0.5], True)
    assert [(group["lr"], group["capturable"]) for group in optimizer.param_groups] == [(0.25, False), (0.5, False)]
    optimizer.param_groups[1]["lr"] = 0.125
    rates.refresh()
    assert [rate.item() for rate in lent] == [0.25, 0.125]  # the tensors that a graph has read
    before = rates.other_settings()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    assert rates.other_settings() != before


@run_ranks(1, 2)
@pytest.mark.parametrize("weights", [[0, 0], [0.0, 0.0]])
def test_a_gradient_without_weight_is_applied_nowhere(world_size, weights):
    def loss_fn(model, batch, state):
        return model(batch.inputs).square().sum(), weights[hora.rank()], {}, state

    model = perceptron()
    train_step = hora.TrainStep(model, loss_fn, torch.optim.AdamW(model.parameters(), 0.1))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(NonFiniteGradient, match="the weights of the global batch are zero, negative or not finite"):
        train_step([samples(0)])
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not train_step.optimizer.state


@run_ranks(2)
@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf")])
def test_a_tensor_that_is_no_weight_is_refused(world_size, weight):
    def loss_fn(model, batch, state):
        return model(batch.inputs).square().sum(), torch.tensor(weight), {}, state

    train_step = hora.TrainStep(model := perceptron(), loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match="weight must be a finite number from 0"):
        train_step([samples(0)])


@run_ranks(1, 2)
def test_a_batch_whose_every_token_is_masked_changes_nothing(world_size):
    def loss_fn(model, batch, state):
        return model(batch.inputs).sum() * 0.0, 0, {}, state

    train_step = hora.TrainStep(model := perceptron(), loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    before = [parameter.clone() for parameter in model.parameters()]
    train_step([samples(0)])
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@run_ranks(1)
def test_states_of_places_that_a_step_does_not_have_are_kept(world_size):
    seen = []

    def loss_fn(model, batch, state):
        seen.append(state)
        loss, weight, metrics, _ = classify(model, batch, None)
        return loss, weight, metrics, (state or 0) + 1

    train_step = hora.TrainStep(model := perceptron(), loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    for num_micro in (2, 1, 0, 2):
        train_step([samples(0)] * num_micro)
    assert seen == [None, None, 1, 2, 1]
    train_step.states = None
    train_step([samples(0)])
    assert seen[-1] is None


def test_new_states_that_are_old_ones_are_carried_whole():
    first, second = torch.tensor(1.0), torch.tensor(2.0)
    carry_states([first, second], [torch.tensor(3.0), first])
    assert (first.item(), second.item()) == (3.0, 1.0)
    carry_states([first, second], [second, first])  # a swap
    assert (first.item(), second.item()) == (1.0, 3.0)


@run_ranks(1)
def test_losses_and_metrics_that_are_no_numbers_are_named(world_size):
    for loss, metrics, problem in [
        (lambda x: x.sum(0), {}, "must be a scalar in floating point"),
        (lambda x: x.sum().detach(), {}, "needs no gradient"),
        (torch.sum, {"a": torch.ones(2)}, r"'a' is a tensor of shape \[2\]"),
        (torch.sum, {"a": "word"}, "'a' is a str"),
    ]:
        model = perceptron()

        def loss_fn(model, batch, state, loss=loss, metrics=metrics):
            return loss(model(batch.inputs)), 1, metrics, state

        with pytest.raises(ConfigError, match=problem):
            hora.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))([samples(0)])


@run_ranks(1)
def test_an_optimizer_of_another_model_is_refused(world_size):
    model, other = perceptron(), perceptron()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1), other)
    with pytest.raises(ConfigError, match="but is one of another"):
        hora.TrainStep(model, classify, optimizer)


class Encoding(dict):
    """As tokenizers return."""

    @property
    def input_ids(self):
        return self["input_ids"]


@dataclass
class Derived:
    values: torch.Tensor
    count: int = field(init=False, default=7)


def test_batches_keep_their_classes():
    encoding = map_tensors(lambda tensor: tensor + 1, Encoding(input_ids=torch.zeros(1)))
    assert (type(encoding), encoding.input_ids.item()) == (Encoding, 1.0)
    derived = map_tensors(lambda tensor: tensor + 1, Derived(torch.zeros(1)))
    assert (derived.values.item(), derived.count) == (1.0, 7)
    assert signature(True) != signature(1) != signature(1.0)


def test_settings_of_an_optimizer_of_named_parameters_can_be_a_key():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.named_parameters(), betas=[0.9, 0.95])
    assert hash(LearningRates(optimizer, torch.device("cpu")).other_settings())
