"""`hvd.DistributedOptimizer` and what goes with it: N ranks make the updates of one process, as scripts written for Horovod expect it."""

import copy
import logging
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hora.hvd as hvd
from hora.hvd.optimizer import _DistributedOptimizer
from hora.testing import run_ranks


@contextmanager
def horovod() -> Iterator[tuple[int, int]]:
    hvd.init()
    try:
        yield hvd.rank(), hvd.size()
    finally:
        hvd.shutdown()


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1)).double()


def data(step: int) -> torch.Tensor:
    return torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(make, steps: int = 4) -> torch.Tensor:
    model = mlp()
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
    return values(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.05)


WAYS = {
    "plain": {},
    "two groups": {"groups": 2},
    "predivided": {"gradient_predivide_factor": 2.0},
    "sparse as dense": {"sparse_as_dense": True},
}


@pytest.mark.parametrize("way", WAYS)
@run_ranks(1, 2, 3)
def test_ranks_make_the_updates_of_one_process(way):
    with horovod() as (rank, size):
        for make in (sgd, adamw):
            model = mlp(seed=rank)
            optimizer = hvd.DistributedOptimizer(make(model), named_parameters=model.named_parameters(), **WAYS[way])
            hvd.broadcast_parameters(mlp().state_dict() if rank == 0 else model.state_dict(), root_rank=0)
            if rank == 0:
                model.load_state_dict(mlp().state_dict())
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, data(step)[rank::size]).backward()
                optimizer.step()
            assert torch.allclose(values(model), alone(make), rtol=1e-9, atol=1e-12)


@run_ranks(2)
def test_named_groups_of_parameters_travel_together(world_size):
    with horovod() as (rank, size):
        model = mlp()
        groups = [[model[0].weight, model[4].weight], [model[2].bias]]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), groups=groups)
        optimizer.zero_grad()
        loss_of(model, data(0)[rank::size]).backward()
        optimizer.step()
        assert torch.allclose(values(model), alone(sgd, 1), rtol=1e-9)
        for wrong in ([[torch.ones(1)]], [[model[0].weight], [model[0].weight]], -1, "two"):
            with pytest.raises(ValueError, match="groups"):
                hvd.DistributedOptimizer(sgd(model), groups=wrong)


@run_ranks(2)
def test_ranks_may_hold_parameters_in_other_orders_and_groups_ones_that_are_frozen(world_size):
    with horovod() as (rank, size):

        def frozen(model: nn.Module, *, reverse: bool = False) -> torch.optim.Optimizer:
            model[0].bias.requires_grad_(False)
            parameters = list(model.parameters())
            return torch.optim.SGD(parameters[::-1] if reverse else parameters, 0.1)  # as from a set

        for groups in (None, 2, lambda model: [[model[0].bias, model[2].bias]]):
            model = mlp()
            optimizer = frozen(model, reverse=rank == 1)
            asked = groups(model) if callable(groups) else groups
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=asked)
            loss_of(model, data(0)[rank::size]).backward()
            optimizer.step()
            assert torch.allclose(values(model), alone(frozen, 1), rtol=1e-9)


@run_ranks(2)
def test_micro_batches_are_summed_and_a_window_may_end_early(world_size):
    """As Horovod [ran]: two passes of x = 1 and 2 on each rank give 3, not 1.5."""
    with horovod() as (rank, _):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("w", weight)], backward_passes_per_step=2)
        for x in (1.0, 2.0):
            (weight * x).sum().backward()
        assert weight.grad.item() == 3.0
        optimizer.step()
        assert weight.item() == -3.0
        optimizer.zero_grad()
        (weight * (1.0 + 2 * rank)).sum().backward()  # the last, odd batch of an epoch
        optimizer.step()
        assert weight.item() == -5.0
        optimizer.zero_grad()
        assert optimizer.backward_passes_per_step == 2
        optimizer.backward_passes_per_step = 1
        (weight * rank).sum().backward()
        assert weight.grad.item() == 0.5


@run_ranks(2, 3)
def test_gradients_are_the_combined_ones_when_backward_returns(world_size):
    with horovod() as (rank, size):
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        loss_of(model, data(0)[rank::size]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        twin = mlp()
        loss_of(twin, data(0)).backward()
        assert torch.allclose(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.01))
        optimizer.step()
        sgd(twin).step()
        assert torch.allclose(values(model), values(twin))


@run_ranks(2, 3)
def test_a_gradient_that_is_missing_on_a_rank_counts_as_zero(world_size):
    with horovod() as (rank, size):
        used, skipped = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, skipped], 1.0), [("used", used), ("skipped", skipped)])
        for _ in range(2):
            optimizer.zero_grad()
            (used.sum() + (skipped.sum() * size if rank == 1 else 0)).backward()
            optimizer.step()
        assert used.tolist() == [-1.0] * 3
        assert skipped.tolist() == [-1.0] * 3


@run_ranks(2, 3)
def test_an_operation_before_the_step_meets_where_ranks_lack_gradients(world_size):
    """As in a script that averages its loss: a rank whose gradients have all come must not wait for the others' step in its backward."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hora").addHandler(handler)
    with horovod() as (rank, size):
        used, skipped = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, skipped], 1.0), [("used", used), ("skipped", skipped)])
        for _ in range(2):
            optimizer.zero_grad()
            loss = used.sum() + (skipped.sum() * size if rank == 1 else 0)
            loss.backward()
            hvd.allreduce(loss.detach(), name="loss")
            optimizer.step()
        assert used.tolist() == skipped.tolist() == [-1.0] * 3
        assert sum("backward() returns before all gradients are combined" in line for line in said) == (rank == 1)
    logging.getLogger("hora").removeHandler(handler)


@run_ranks(2)
def test_sparse_gradients_are_added_up(world_size):
    with horovod() as (rank, _):
        for as_dense in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1))
            before = model[0].weight.detach().clone()
            inner = torch.optim.SparseAdam([model[0].weight], 1.0)
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), sparse_as_dense=as_dense)
            model(torch.tensor([rank, 5])).sum().backward()
            optimizer.step()
            moved = (before - model[0].weight.detach()).abs().sum(1) > 0
            assert moved.tolist() == [True, True, False, False, False, True]
            assert model[0].weight.grad.is_sparse
            optimizer.zero_grad()
            before = model[0].weight.detach().clone()
            if rank == 0:  # the other has no gradient
                model(torch.tensor([2])).sum().backward()
            hvd.allreduce(torch.ones(1), name="between")
            optimizer.step()
            moved = (before - model[0].weight.detach()).abs().sum(1) > 0
            assert moved.tolist() == [False, False, True, False, False, False]


@run_ranks(2)
def test_synchronize_and_skip_synchronize(world_size):
    with horovod() as (rank, size):
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        loss_of(model, data(0)[rank::size]).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert torch.allclose(values(model), alone(sgd, 1))
        optimizer.zero_grad()
        loss_of(model, data(1)[rank::size]).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match=r"without optimizer.skip_synchronize\(\)") as caught:
            optimizer.step()
        assert len(caught) == 1
        assert torch.allclose(values(model), alone(sgd, 2))
        # A step that is left out after synchronize() has the next one combined all the same, whatever clears the gradients.
        for leave_out in (model.zero_grad, lambda: optimizer.load_state_dict(optimizer.state_dict())):
            optimizer.zero_grad()
            loss_of(model, data(2)[rank::size]).backward()
            optimizer.synchronize()
            leave_out()
            model.zero_grad()
            before = model[4].bias.detach().clone()
            (model[4].bias * rank).sum().backward()  # the others have no gradient, so that nothing is combined before the step
            optimizer.step()
            momentum = optimizer.state[model[4].bias]["momentum_buffer"]
            assert torch.allclose(before - model[4].bias, 0.1 * momentum)
            assert torch.equal(*hvd.allgather(momentum))


@run_ranks(2)
def test_the_assertions_that_users_rely_on(world_size):
    with horovod():
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        loss_of(model, data(0)).backward()
        with pytest.raises(AssertionError, match="prohibited as it can cause a race condition"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times before call to step"):
            loss_of(model, data(0)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad.eq(0).all() for p in model.parameters())
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in model.parameters())


@run_ranks(1, 2)
def test_arguments_that_do_not_fit_are_refused(world_size):
    with horovod():
        model = mlp()
        named = list(model.named_parameters())
        for arguments, text in (
            ({"named_parameters": model.parameters()}, "sequence of tuples"),
            ({"named_parameters": [("a", p) for _, p in named]}, "Found duplicates: a"),
            ({"named_parameters": named[:2]}, "were not named"),
            ({"backward_passes_per_step": 0}, "must be > 0"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "not supported with op != Average"),
            ({"op": hvd.Max}, "op must be"),
        ):
            with pytest.raises(ValueError, match=text):
                hvd.DistributedOptimizer(sgd(model), **arguments)


@run_ranks(2)
def test_it_is_the_users_optimizer_and_can_be_copied_and_pickled(world_size):
    with horovod() as (rank, size):
        model = mlp()
        inner = adamw(model)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        assert isinstance(optimizer, torch.optim.AdamW)
        assert type(optimizer).__name__ == "AdamW"
        assert isinstance(optimizer, _DistributedOptimizer), "as scripts expect it of Horovod, too"
        assert "horovod" in str(optimizer.__class__), "by which Lightning knows what is distributed already"
        assert optimizer.param_groups is inner.param_groups
        loss_of(model, data(0)[rank::size]).backward()
        optimizer.step()
        pairs = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer))), (model, optimizer)]
        for a_model, an_optimizer in pairs:
            an_optimizer.zero_grad()
            loss_of(a_model, data(1)[rank::size]).backward()
            an_optimizer.step()
            assert torch.allclose(values(a_model), alone(adamw, 2), rtol=1e-9)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        assert inner.param_groups is optimizer.param_groups
        again = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
        assert type(again).__mro__[2] is torch.optim.AdamW
        again.zero_grad()
        (loss_of(model, data(2)[rank::size]) / size).backward()
        again.step()
        assert torch.allclose(values(model), alone(adamw, 3), rtol=1e-9)


@run_ranks(2)
def test_schedules_work_whether_made_before_or_after(world_size):
    with horovod() as (rank, size), warnings.catch_warnings():
        warnings.simplefilter("error")
        for before in (True, False):
            model = mlp()
            inner = sgd(model)
            schedule = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5) if before else None
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
            schedule = schedule or torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10)
            steps: list = []
            optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, data(step)[rank::size]).backward()
                optimizer.step()
                schedule.step()
            assert len(steps) == 4
            assert optimizer.param_groups[0]["lr"] == (0.025 if before else schedule.get_last_lr()[0])


@run_ranks(2)
def test_a_grad_scaler_needs_no_ceremony_and_may_skip_a_step(world_size):
    with horovod() as (rank, size):
        model = mlp().float()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            before = values(model)
            loss = loss_of(model, data(step)[rank::size].float())
            scaler.scale(loss * (float("inf") if step == 1 and rank == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, values(model)) == (step == 1)  # on the other rank too
        assert scaler.get_scale() == 2.0


@run_ranks(2)
def test_a_closure_that_computes_the_loss(world_size):
    with horovod() as (rank, size):
        model, twin = mlp(), mlp()
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), model.named_parameters())
        other = torch.optim.LBFGS(twin.parameters(), max_iter=3)

        def closure(module, optimizer, inputs):
            optimizer.zero_grad()
            loss = loss_of(module, inputs)
            loss.backward()
            return hvd.allreduce(loss.detach())

        optimizer.step(lambda: closure(model, optimizer, data(0)[rank::size]))
        other.step(lambda: closure(twin, other, data(0)))
        assert torch.allclose(values(model), values(twin))


@run_ranks(2, 3)
def test_ranks_with_fewer_batches_join(world_size):
    """As in an epoch that does not divide: who is done counts as zeros, and has the same model after the last rank's broadcast."""
    with horovod() as (rank, size):
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for step in range(rank + 2):
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            optimizer.step()
        last = hvd.join()
        assert last == size - 1
        hvd.broadcast_parameters(model.state_dict(), last)
        twin = mlp()
        other = sgd(twin)
        for step in range(size + 1):
            other.zero_grad()
            (loss_of(twin, data(step)) * (size - max(0, step - 1)) / size).backward()
            other.step()
        assert torch.allclose(values(model), values(twin), rtol=1e-9)


@run_ranks(3)
def test_ranks_outside_the_process_set_train_alone(world_size):
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    try:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("w", weight)], process_set=pair)
        (weight * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        assert weight.item() == (-2.0 if pair.included() else -2.0 * hvd.rank())
        hvd.barrier()  # who leaves ends the world of all, other process sets included
    finally:
        hvd.shutdown()


@run_ranks(2)
def test_parameters_that_are_added_later_are_combined_too(world_size):
    with horovod() as (rank, _):
        first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], 1.0), [("first", first)])
        optimizer.add_param_group({"params": [second], "lr": 2.0})
        for _ in range(2):
            optimizer.zero_grad()
            ((first + second) * (rank * 2.0)).sum().backward()
            optimizer.step()
        assert (first.item(), second.item()) == (-2.0, -4.0)


@run_ranks(2)
def test_half_precision_on_the_way(world_size):
    with horovod() as (rank, size):
        for compression, tolerance in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2)):
            model = mlp()
            optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)
            loss_of(model, data(0)[rank::size]).backward()
            assert model[0].weight.grad.dtype is torch.float64
            optimizer.step()
            assert torch.allclose(values(model), alone(sgd, 1), atol=tolerance)
        large = torch.full((3,), 7e4)
        with pytest.warns(RuntimeWarning, match="float16 holds at most 65504"):
            assert hvd.allreduce(large, compression=hvd.Compression.fp16).isinf().all()
        assert hvd.allreduce(large, compression=hvd.Compression.bf16)[0].item() == pytest.approx(7e4, rel=1e-2)


@run_ranks(2)
def test_a_type_that_changes_on_all_ranks_is_combined_as_it_is_and_on_one_is_an_error(world_size):
    """A bucket is described as it was in its first step."""
    with horovod() as (rank, size):
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())

        def train(kind):
            optimizer.zero_grad()
            model.to(kind)
            loss_of(model, data(0)[rank::size].to(kind)).backward()
            assert model[0].weight.grad.dtype is kind
            one, other = hvd.allgather(model[0].weight.grad.reshape(1, -1))
            assert torch.equal(one, other)
            optimizer.step()

        train(torch.float64)
        train(torch.float32)
        with pytest.raises(hvd.HorovodInternalError, match="float32 SUM; rank 1: all_reduce of .* float64 SUM"):
            train((torch.float32, torch.float64)[rank])


@run_ranks(2)
def test_adasum_combines_updates(world_size):
    with horovod() as (rank, _):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("w", weight)], op=hvd.Adasum)
        (weight[rank] * 3).backward()
        optimizer.step()
        assert weight.tolist() == [-3.0, -3.0]  # orthogonal: both whole
        optimizer.zero_grad()
        (weight[0] * 2).backward()
        optimizer.step()
        assert weight.tolist() == [-5.0, -3.0]  # the same: once
        with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
            pass


@run_ranks(2, 3)
def test_state_and_objects_of_one_rank_for_everybody(world_size):
    with horovod() as (rank, size):
        model = mlp(rank)
        hvd.broadcast_parameters(model.named_parameters(), 1)  # a generator, which Horovod refuses
        assert torch.equal(values(model), values(mlp(1)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1 * (rank + 1))
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert not optimizer.state  # no step was taken
        assert torch.equal(values(model), values(mlp(1)))
        assert hvd.broadcast_object({"epoch": 3, "w": torch.ones(2)} if rank == 0 else None)["epoch"] == 3
        assert hvd.broadcast_object([rank] * 3, size - 1, name="x") == [size - 1] * 3
        assert hvd.allgather_object({"rank": rank, "pad": "x" * 1000 * rank}) == [{"rank": r, "pad": "x" * 1000 * r} for r in range(size)]
        for wrong in (5, [("a", 1)]):
            with pytest.raises(ValueError, match="invalid params of type"):
                hvd.broadcast_parameters(wrong, 0)
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)


class Odd:
    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self):
        return Odd, (self.value,)


@run_ranks(2)
def test_pickle_is_off_and_loud_when_on(world_size):
    with horovod() as (rank, _):
        with pytest.raises(ValueError, match="rank 0 cannot send its object: .*HORA_HVD_ALLOW_PICKLE=1"):
            hvd.broadcast_object(Odd(3))
        os.environ["HORA_HVD_ALLOW_PICKLE"] = "1"
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = hvd.broadcast_object(Odd(3))
            assert any("sent by pickle" in str(each.message) for each in caught) == (rank == 0)
            assert found.value == 3
        finally:
            del os.environ["HORA_HVD_ALLOW_PICKLE"]


@run_ranks(2)
def test_batch_statistics_are_those_of_all_ranks(world_size):
    with horovod() as (rank, size):
        synced, plain = hvd.SyncBatchNorm(5).double(), nn.BatchNorm1d(5).double()
        whole = data(0)
        assert torch.allclose(synced(whole[rank::size]), plain(whole)[rank::size])
        assert torch.allclose(synced.running_var, plain.running_var)


@run_ranks(2)
def test_two_optimizers_of_one_script(world_size):
    """As in a GAN: without names, in turns, and with a loss that runs through both models."""
    with horovod() as (rank, size):
        torch.manual_seed(0)
        first, second = nn.Linear(5, 4).double(), nn.Linear(4, 1).double()
        a = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), 0.1))
        b = hvd.DistributedOptimizer(torch.optim.SGD(second.parameters(), 0.1))
        F.relu(second(first(data(0)[rank::size]))).sum().backward()
        a.step()
        b.step()
        found = hvd.allgather(torch.cat([values(first), values(second)])[None])
        assert torch.equal(found[0], found[1])
