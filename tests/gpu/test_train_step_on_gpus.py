"""`TrainStep` on GPUs: a replayed graph gives the bits of eager steps, and nothing in it is frozen that should change."""

import copy
import math
import os
import warnings
from itertools import pairwise
from unittest import mock

import pytest
import test_train_step
import torch
import torch.nn.functional as F
from gpu_ranks import SEVERAL, WORLD_SIZES, needs_two
from test_train_step import Batch, classify, samples, shares
from torch import nn

import hora
from hora.errors import NonFiniteGradient
from hora.testing import run_ranks


def perceptron(dropout: float = 0.0, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)]
    return nn.Sequential(*layers).cuda()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
}


def train(
    capture,
    steps,
    *,
    optimizer="adamw",
    dropout=0.3,
    norm=False,
    num_micro=2,
    clip_norm=0.5,
    precision="float32",
    compiled=False,
    wire=None,
    **sync,
):
    model = perceptron(dropout, norm)
    train_step = hora.TrainStep(
        model,
        classify,
        hora.DistributedOptimizer(OPTIMIZERS[optimizer](model.parameters()), model, wire_dtype=wire and getattr(torch, wire), **sync),
        clip_norm=clip_norm,
        precision=precision,
        capture=capture,
        compile=compiled,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(train_step.optimizer, 0.9)
    torch.cuda.manual_seed(hora.rank())
    numbers = []
    for step in range(steps):
        result = train_step(shares(step, hora.world_size(), num_micro))
        schedule.step()
        norm = train_step.optimizer.last_grad_norm  # None while float16 overflows, and then perhaps no number
        numbers.append([f"{float(n)}" for n in (result.loss, result.weight, result.metrics["correct"], math.nan if norm is None else norm)])
    state = [*model.state_dict().values(), *(value for state in train_step.optimizer.state.values() for value in state.values())]
    return train_step, numbers, [tensor.cpu() for tensor in state if isinstance(tensor, torch.Tensor)]


@run_ranks(*WORLD_SIZES, backend="nccl")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": True, "num_micro": 1},
        {"precision": "bfloat16", "clip_norm": 100.0},
        {"precision": "float16"},
        {"clip_norm": None},
        {"clip_norm": None, "precision": "float16", "strategy": "sharded"},
        {"clip_norm": None, "num_micro": 1, "bucket_cap_bytes": 64},
        {"clip_norm": None, "bucket_cap_bytes": 64, "strategy": "sharded"},
        {"clip_norm": None, "bucket_cap_bytes": 64, "wire": "bfloat16"},
        {"strategy": "sharded", "wire": "bfloat16"},
        {"strategy": "sharded"},
    ],
)
def test_captured_steps_have_the_bits_of_eager_ones(world_size, optimizer, options):
    eager, numbers, state = train(False, 12, optimizer=optimizer, **options)
    captured, again, same = train("auto", 12, optimizer=optimizer, **options)
    assert (eager.num_replayed, captured.num_replayed, captured.eager_because) == (0, 9, None)
    assert numbers == again
    assert all(torch.equal(*pair) for pair in zip(state, same, strict=True))


@pytest.mark.parametrize("how", [True, "parts"])
@run_ranks(*WORLD_SIZES[:2], backend="nccl", timeout_s=110.0)
def test_compiled_and_captured_steps_have_the_bits_of_compiled_ones(world_size, how):
    # The compiler's own variables, processes and warnings are not what is tested.
    import torch._inductor.config

    with mock.patch.dict(os.environ), torch._inductor.config.patch(compile_threads=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, numbers, state = train(False, 8, compiled=how, dropout=0.0)
        captured, again, same = train("auto", 8, compiled=how, dropout=0.0)
    assert (captured.num_replayed, numbers) == (5, again)
    assert all(torch.equal(*pair) for pair in zip(state, same, strict=True))


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_micro_batches_that_do_not_fit_are_cut_and_then_captured(world_size):
    def hungry(model, batch, state):
        if hora.rank() == 0 and len(batch.targets) > 4:
            torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
        return classify(model, batch, state)

    model = perceptron()
    train_step = hora.TrainStep(model, hungry, torch.optim.AdamW(model.parameters(), 0.01), micro_batch_size="auto")
    weights = [int(train_step([samples(step)]).weight) for step in range(8)]
    assert weights == [12 * world_size] * 8
    assert (train_step.micro_batch_size, train_step.num_replayed, train_step.eager_because) == (3, 5, None)


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_the_loss_scale_sinks_in_a_replay_too(world_size):
    """An update that overflows is left out and counted, and is no error; the scale is the same on all ranks."""

    def scaled(model, batch, state):
        loss, weight, metrics, state = classify(model, Batch(*batch[:2]), state)
        return loss * batch[2], weight, metrics, state

    model = perceptron()
    train_step = hora.TrainStep(model, scaled, torch.optim.AdamW(model.parameters(), 0.01), precision="float16")
    inputs, targets = (tensor.cuda() for tensor in samples(0))
    for step in range(12):
        before = model[0].weight.detach().clone()
        large = step in (6, 7, 9) and hora.rank() == world_size - 1
        train_step([(inputs, targets, torch.tensor(1e4 if large else 1e-3).cuda())])
        assert torch.equal(before, model[0].weight) is (step in (6, 7, 9))
    train_step.optimizer.settle_checks()
    assert (train_step.num_replayed, train_step.optimizer.skipped_steps, train_step.loss_scale.item()) == (9, 3, 2.0**13)
    assert hora.all_gather_object(train_step.state_dict()) == [{"loss_scale": {"scale": 2.0**13, "good_updates": 2}}] * world_size


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_dropout_is_drawn_anew_in_each_replay(world_size):
    model = perceptron(dropout=0.5)
    train_step = hora.TrainStep(model, classify, torch.optim.SGD(model.parameters(), 0.0))
    losses = [train_step([samples(0)]).loss.item() for _ in range(10)]
    assert train_step.num_replayed == 7
    assert len(set(losses)) == 10


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_each_shape_has_a_graph_and_states_go_from_one_to_the_other(world_size):
    def count(model, batch, state):
        steps = torch.zeros((), device="cuda") if state is None else state
        loss, weight, _, _ = classify(model, batch, None)
        return loss, weight, {"steps": steps}, steps + 1

    model = perceptron()
    train_step = hora.TrainStep(model, count, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(20):
        size = (3, 5)[step % 2]
        batch = Batch(*(tensor[:size].cuda() for tensor in samples(step)))
        result = train_step([batch])
        assert (int(result.weight), int(result.metrics["steps"])) == (size * world_size, step * world_size)
    assert train_step.num_replayed >= 12
    assert train_step.states[0].item() == 20
    train_step.states = []
    assert int(train_step([Batch(*(tensor[:3].cuda() for tensor in samples(0)))]).metrics["steps"]) == 0


@needs_two
@run_ranks(*SEVERAL, backend="nccl")
def test_ranks_with_unlike_numbers_of_micro_batches_replay_together(world_size):
    model = perceptron()
    train_step = hora.TrainStep(model, classify, torch.optim.SGD(model.parameters(), 0.1))
    reference = perceptron()
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(8):
        mine = [Batch(*(tensor.cuda() for tensor in samples(100 * step + place))) for place in range(1 + hora.rank())]
        result = train_step(mine)
        loss, weight = 0.0, 0
        for rank in range(world_size):
            for place in range(1 + rank):
                part, count, _, _ = classify(reference, Batch(*(tensor.cuda() for tensor in samples(100 * step + place))), None)
                loss, weight = loss + part, weight + count
        optimizer.zero_grad()
        (loss / weight).backward()
        optimizer.step()
        assert result.loss.item() == pytest.approx(loss.item() / weight, rel=1e-4)
    assert train_step.num_replayed == 5
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@needs_two
@run_ranks(*SEVERAL, backend="nccl")
def test_a_rank_without_micro_batches_makes_all_run_eagerly_in_that_step(world_size):
    model = perceptron()
    train_step = hora.TrainStep(model, classify, torch.optim.SGD(model.parameters(), 0.1))
    replayed = []
    for step in range(8):
        empty = step == 6 and hora.rank() == 1
        train_step([] if empty else [samples(step)])
        replayed.append(train_step.num_replayed)
    assert replayed == [0, 0, 0, 1, 2, 3, 3, 4]


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_what_cannot_be_captured_runs_eagerly_on_all_ranks_and_says_where(world_size):
    def looks(model, batch, state):
        loss, weight, metrics, state = classify(model, batch, state)
        if hora.rank() == hora.world_size() - 1:
            assert loss.item() > -1  # reads the device
        return loss, weight, metrics, state

    model, again = perceptron(dropout=0.3), perceptron(dropout=0.3)
    train_step = hora.TrainStep(model, looks, torch.optim.AdamW(model.parameters(), 0.01))
    plain = hora.TrainStep(again, classify, torch.optim.AdamW(again.parameters(), 0.01), capture=False)
    losses = []
    for each in (train_step, plain):
        torch.cuda.manual_seed(hora.rank())
        losses.append([each([samples(step)]).loss.item() for step in range(7)])
    assert losses[0] == losses[1]
    assert train_step.num_replayed == 0
    expected = "assert loss.item() > -1" if hora.rank() == world_size - 1 else f"rank {world_size - 1} could not capture it"
    assert expected in str(train_step.eager_because)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


@run_ranks(*WORLD_SIZES, backend="nccl")
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_is_left_out_of_a_replay_and_reported_within_two_steps(world_size, policy):
    model = perceptron()
    optimizer = hora.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model, checks=hora.Checks(non_finite=policy)
    )
    train_step = hora.TrainStep(model, classify, optimizer)
    last = world_size - 1
    for step in range(6):
        train_step([samples(step)])
    before = [parameter.clone() for parameter in model.parameters()]
    bad = samples(6)
    if hora.rank() == last:
        bad.inputs[0] = float("inf")
    train_step([bad])
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    if policy == "raise":
        with pytest.raises(NonFiniteGradient, match=f"update 6 were not, on rank {last} first at micro-step 0, whose loss was not finite"):
            train_step([samples(8)])
            train_step([samples(9)])
    else:
        for step in range(8, 12):
            train_step([samples(step)])
        assert optimizer.skipped_steps == 1
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert train_step.num_replayed >= 4


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_settling_reports_what_is_under_way(world_size):
    model = perceptron()
    train_step = hora.TrainStep(model, classify, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(5):
        train_step([samples(step)])
    bad = samples(6)
    bad.inputs[0] = float("nan")
    train_step([bad])
    with pytest.raises(NonFiniteGradient, match="'0.weight'"):
        train_step.optimizer.settle_checks()


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_a_changed_setting_of_the_optimizer_is_captured_anew(world_size):
    model, again = perceptron(), perceptron()
    steps = [
        hora.TrainStep(each, classify, torch.optim.AdamW(each.parameters(), 0.01), capture=how)
        for each, how in ((model, "auto"), (again, False))
    ]
    for step in range(12):
        for train_step in steps:
            train_step([samples(step)])
            if step == 6:
                train_step.optimizer.param_groups[0]["weight_decay"] = 0.5
                train_step.optimizer.param_groups[0]["lr"] = 0.02
    assert steps[0].num_replayed >= 7
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_lstm_with_carried_state_and_a_stop_flag(world_size):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.lstm, self.out = nn.Embedding(50, 16), nn.LSTM(16, 16, 2), nn.Linear(16, 50)

        def forward(self, words, state):
            values, state = self.lstm(self.table(words), state)
            return self.out(values), state

    def loss_fn(model, words, state):
        logits, state = model(words[:-1], state)
        return F.cross_entropy(logits.flatten(0, 1), words[1:].flatten(), reduction="sum"), words[1:].numel(), {}, state

    runs = []
    for capture in ("auto", False):
        model = Model().cuda()
        train_step = hora.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 1.0), clip_norm=5.0, capture=capture)
        generator = torch.Generator().manual_seed(hora.rank())
        losses = []
        for step in range(10):
            if step == 7 and hora.rank() == world_size - 1:
                train_step.optimizer.request_stop()
            losses.append(train_step([torch.randint(50, (9, 4), generator=generator)]).loss.item())
        assert train_step.optimizer.stop_agreed
        runs.append((losses, [parameter.cpu() for parameter in model.parameters()], train_step.num_replayed))
    assert (runs[0][0], runs[0][2], runs[1][2]) == (runs[1][0], 6, 0)
    assert all(torch.equal(*pair) for pair in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exact_mode_runs_eagerly_and_keeps_its_bits(spawn_ranks, world_size):
    (alone,) = spawn_ranks(1, test_train_step.body_exact, init={"exact": True, "device": "cuda"}, num_steps=3).wait(60.0)
    among = spawn_ranks(world_size, test_train_step.body_exact, init={"exact": True, "device": "cuda"}, num_steps=3).wait(60.0)
    assert [outcome.result for outcome in among] == [alone.result] * world_size


def body_with_graphs() -> int:
    model = perceptron()
    train_step = hora.TrainStep(model, classify, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(6):
        train_step([samples(step)])
    hora.shutdown()  # NCCL waits for graphs that hold its calls
    return train_step.num_replayed


@needs_two
@pytest.mark.gpu
@pytest.mark.parametrize("world_size", SEVERAL)
def test_the_session_ends_while_there_are_graphs(spawn_ranks, world_size):
    outcomes = spawn_ranks(world_size, body_with_graphs, init={"device": "cuda"}).wait(60.0)
    assert [outcome.result for outcome in outcomes] == [3] * world_size, outcomes


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_state_that_is_loaded_is_captured_anew(world_size):
    model, again = perceptron(), perceptron()
    steps = [
        hora.TrainStep(each, classify, torch.optim.AdamW(each.parameters(), 0.01), capture=how)
        for each, how in ((model, "auto"), (again, False))
    ]
    for train_step in steps:
        for step in range(6):
            train_step([samples(step)])
        saved = copy.deepcopy(train_step.optimizer.state_dict())
        for step in range(6, 10):
            train_step([samples(step)])
        train_step.optimizer.load_state_dict(saved)
        kept = [torch.full((1000,), 7.0, device="cuda") for _ in range(50)]  # where the old state lay
        for step in range(10, 14):
            train_step([samples(step)])
        assert all(bool((tensor == 7.0).all()) for tensor in kept)
    assert steps[0].num_replayed >= 9
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_states_that_move_from_place_to_place_are_as_eagerly(world_size):
    def loss_fn(model, batch, state):
        now, before = (torch.zeros((), device="cuda"), torch.full((), -1.0, device="cuda")) if state is None else state
        loss, weight, _, _ = classify(model, batch, None)
        return loss, weight, {"now": now, "before": before}, (now + 1, now)

    train_step = hora.TrainStep(model := perceptron(), loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(8):
        metrics = train_step([samples(step)]).metrics
        assert (metrics["now"].item(), metrics["before"].item()) == (step * world_size, (step - 1) * world_size)
    assert train_step.num_replayed >= 3


@needs_two
@run_ranks(*SEVERAL, backend="nccl")
def test_collectives_in_the_loss_run_eagerly(world_size):
    def loss_fn(model, batch, state):
        loss, weight, metrics, state = classify(model, batch, state)
        return loss, weight, {**metrics, "mine": hora.all_reduce(torch.ones((), device="cuda"))}, state

    train_step = hora.TrainStep(model := perceptron(), loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(6):
        assert int(train_step([samples(step)]).metrics["mine"]) == world_size**2
    assert "ranks cannot agree on all_reduce" in str(train_step.eager_because)


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_gradients_and_their_norm_are_there_after_a_replay(world_size):
    train_step = hora.TrainStep(model := perceptron(), classify, torch.optim.SGD(model.parameters(), 0.1), clip_norm=1e6)
    for step in range(8):
        train_step([samples(step)])
        norm = torch.linalg.vector_norm(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        torch.testing.assert_close(norm, train_step.optimizer.last_grad_norm)
        train_step.optimizer.zero_grad()
    assert train_step.num_replayed >= 4


@run_ranks(*WORLD_SIZES, backend="nccl")
def test_a_graph_does_not_read_the_weight_of_the_steps_before_it(world_size):
    train_step = hora.TrainStep(model := perceptron(), classify, torch.optim.AdamW(model.parameters(), 0.01))
    synchronizer, weight = train_step.optimizer.synchronizer, torch.full((), 3.0, device="cuda")
    for step in range(3):
        train_step(shares(step, world_size, 1))
    synchronizer.local_weight = weight
    after = [3.0]
    for step in range(3, 7):
        train_step(shares(step, world_size, 1))
        after.append(float(synchronizer.local_weight))
        weight.fill_(1e6)  # as memory that is given back and used by others
    assert train_step.num_replayed == 4, train_step.eager_because
    added = [later - earlier for earlier, later in pairwise(after)]
    assert added == [added[0]] * 4
    assert 0 < added[0] < 1000
