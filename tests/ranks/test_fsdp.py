"""`fully_shard` (FSDP2) beside Hora: its loader and its checkpoints serve it, and what is for whole parameters refuses it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import hora
from hora.errors import ConfigError
from hora.testing import run_ranks
from hora.testing.reference import assert_same, train
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.weights import load_weights

GLOBAL_BATCH = 12
WHOLE = StateDictOptions(full_state_dict=True)
WHOLE_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def perceptron() -> nn.Module:
    """Of sizes that no number of ranks divides."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3)).to(hora.device())


class Recomputed(nn.Sequential):
    """Each layer computes its activations again in backward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self:
            inputs = checkpoint(layer, inputs, use_reentrant=False)
        return inputs


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4 * GLOBAL_BATCH, 7, generator=generator), torch.randint(3, (4 * GLOBAL_BATCH,), generator=generator)


def dealt_out(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(hora.device().type, (hora.world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_sum(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), targets, reduction="sum")


def make(dealt: bool = True, recomputed: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, hora.DataLoader]:
    model = Recomputed(*perceptron()) if recomputed else perceptron()
    if dealt:
        dealt_out(model)
    dataset = torch.utils.data.TensorDataset(*samples())
    return model, torch.optim.AdamW(model.parameters(), 0.05), hora.DataLoader(dataset, global_batch_size=GLOBAL_BATCH, shuffle=False)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, loader: hora.DataLoader, num_steps: int) -> None:
    for _, step in zip(range(num_steps), loader, strict=False):
        for inputs, targets in step:
            # FSDP takes the mean over the ranks.
            (loss_sum(model, inputs.to(hora.device()), targets.to(hora.device())) * hora.world_size() / GLOBAL_BATCH).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu()
        for name, parameter in model.named_parameters()
    }


def one_process(num_steps: int) -> dict[str, torch.Tensor | None]:
    """What a plain loop without Hora makes of the same batches."""
    model = perceptron().cpu()
    inputs, targets = (tensor.split(GLOBAL_BATCH) for tensor in samples())
    steps = list(zip(inputs, targets, strict=True))[:num_steps]
    train(model, torch.optim.AdamW(model.parameters(), 0.05), steps, loss_sum, clip_norm=1.0)
    return values(model)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, loader: hora.DataLoader) -> dict:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "loader": loader.state_dict()}


@run_ranks(1, 2, 3)
def test_updates_are_those_of_one_process() -> None:
    model, optimizer, loader = make()
    advance(model, optimizer, loader, 4)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_same(values(model), one_process(4), 1e-5)


@run_ranks(2)
def test_recomputed_activations_change_nothing() -> None:
    model, optimizer, loader = make(recomputed=True)
    advance(model, optimizer, loader, 4)
    assert_same(values(model), one_process(4), 1e-5)


def begin(directory: Path) -> None:
    model, optimizer, loader = make()
    advance(model, optimizer, loader, 2)
    Checkpointer(directory).save(state_of(model, optimizer, loader), step=2, epoch=0)
    assert_same(values(model), one_process(2), 1e-5)


def go_on(directory: Path, dealt: bool, from_rank_0: bool = False) -> None:
    restored = Checkpointer(directory).load().state
    model, optimizer, loader = make(dealt)
    how = WHOLE_FROM_RANK_0 if from_rank_0 else WHOLE
    set_model_state_dict(model, restored["model"], options=how)
    set_optimizer_state_dict(model, optimizer, restored["optimizer"], options=how)
    loader.load_state_dict(restored["loader"])
    assert_same(values(model), one_process(2), 1e-5)
    advance(model, optimizer, loader, 2)
    assert_same(values(model), one_process(4), 1e-5)


@pytest.mark.parametrize("backend", [None, "gloo"])  # None: shared memory
def test_a_run_goes_on_with_any_number_of_ranks_and_without_fsdp(rank_pools, tmp_path, backend):
    how = {"backend": backend, "device": "cpu"}
    ranks_then, goes_on = (
        (2, [(3, True, True)]) if backend else (4, [(2, True, False), (2, True, True), (1, True, True), (1, False, False)])
    )
    for size, body, arguments in [(ranks_then, begin, {}), *((n, go_on, {"dealt": d, "from_rank_0": r}) for n, d, r in goes_on)]:
        outcomes = rank_pools.run(body, {"directory": tmp_path, **arguments}, world_size=size, how=how, timeout_s=60.0)
        assert all(outcome.clean for outcome in outcomes), outcomes


@run_ranks(1, 2, 3)
def test_a_checkpoint_holds_whole_tensors_of_any_tree(tmp_path: Path) -> None:
    model, optimizer, loader = make()
    advance(model, optimizer, loader, 1)
    whole = values(model)
    path = Checkpointer(tmp_path).save({"model": model.state_dict(), "own": [optimizer.state_dict(), {"note": 1}]}, step=1, epoch=0)
    plain = perceptron()
    load_weights(path, plain)
    assert_same(values(plain), whole, 0.0)
    state, note = Checkpointer(tmp_path).load().state["own"]
    assert note == {"note": 1}
    torch.optim.AdamW(plain.parameters()).load_state_dict(state)
    assert [tuple(entry["exp_avg"].shape) for entry in state["state"].values()] == [tuple(tensor.shape) for tensor in whole.values()]


@run_ranks(4)
def test_parts_of_replicas_and_of_tensor_parallelism_are_put_together(tmp_path: Path) -> None:
    replicas, columns = perceptron(), perceptron()
    fully_shard(replicas, mesh=init_device_mesh(hora.device().type, (2, 2), mesh_dim_names=("replicas", "parts")))
    parallelize_module(columns, init_device_mesh(hora.device().type, (4,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"replicas": replicas.state_dict(), "columns": columns.state_dict()}, step=1, epoch=0)
    for found in checkpointer.load().state.values():
        assert_same(found, values(perceptron()), 0.0)


@run_ranks(2, 3)
def test_what_cannot_be_put_together_is_refused_on_all_ranks(tmp_path: Path, world_size: int) -> None:
    mesh = init_device_mesh(hora.device().type, (world_size,))
    part = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    last = hora.rank() == world_size - 1
    checkpointer = Checkpointer(tmp_path)
    for other in ({}, {"a": part, "b": part}, {"a": distribute_tensor(torch.zeros(7), mesh, [Shard(0)])}):
        name = "b" if "b" in other else "a"
        with pytest.raises(
            ConfigError, match=rf"own\.{name} is not the same on rank {world_size - 1} as on rank 0; call save with the same"
        ):
            checkpointer.save({"own": other if last else {"a": part}}, step=1, epoch=0)
    alone = init_device_mesh(hora.device().type, (world_size, 1), mesh_dim_names=("all", "one"))["one"]
    with pytest.raises(ConfigError, match=rf"dealt out over all {world_size} ranks, but own\.a is dealt out over 1"):
        checkpointer.save({"own": {"a": distribute_tensor(torch.zeros(3), alone, [Shard(0)])}}, step=1, epoch=0)
    checkpointer.save({"own": {"a": part}}, step=1, epoch=0)
    assert torch.equal(checkpointer.load().state["own"]["a"], torch.arange(6.0))


@run_ranks(2)
def test_buffers_are_whole_and_can_be_made_the_same() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), mesh=init_device_mesh(hora.device().type, (hora.world_size(),)))
    model[1].running_mean.fill_(hora.rank())
    hora.sync_buffers(model)
    assert torch.equal(model[1].running_mean.cpu(), torch.full((5,), 0.5))


@run_ranks(1, 2)
def test_what_is_for_whole_tensors_refuses_it_and_says_what_to_do(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    advice = r"0\.weight is a DTensor, of which each rank has a part: fully_shard \(FSDP2\) sums their gradients itself, so use the plain"
    with pytest.raises(ConfigError, match=advice):
        hora.DistributedOptimizer(optimizer, model)
    with pytest.raises(ConfigError, match=advice):
        hora.TrainStep(model, lambda model, batch, state: (model(batch).sum(), 1, {}, state), optimizer)
    with pytest.raises(ConfigError, match=advice):
        hora.broadcast_parameters(model)
    for call in (lambda: hora.broadcast_optimizer_state(optimizer), lambda: hora.sync_gradients(model)):
        with pytest.raises(ConfigError, match="but parameter 0 is a DTensor"):
            call()
    with pytest.raises(ConfigError, match=r"must be whole, but is a DTensor.*to_local\(\) or tensor\.full_tensor\(\)"):
        hora.all_reduce(next(model.parameters()))
    with pytest.raises(ConfigError, match=r"holds whole tensors, but own is a DTensor"):
        hora.all_gather_object({"own": next(model.parameters())})
    with pytest.raises(ConfigError, match=r"0\.weight is a DTensor, of which each rank has a part: call it before fully_shard"):
        load_weights(tmp_path / "absent.safetensors", model)


@run_ranks(1, 2)
def test_a_model_that_is_dealt_out_under_an_optimizer_is_not_left_untrained() -> None:
    model = perceptron()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    dealt_out(model)
    with pytest.raises(ConfigError, match=r"added, replaced, .*: 0\.bias, .*; make a new DistributedOptimizer"):
        for inputs in optimizer.micro_batches([torch.zeros(2, 7, device=hora.device())]):
            optimizer.backward(model(inputs).sum(), weight=2)
