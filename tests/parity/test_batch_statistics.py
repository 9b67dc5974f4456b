"""BatchNorm on many ranks: SyncBatchNorm equals one process on the global batch; running statistics combine when somebody looks."""

import copy

import pytest
import torch
from test_gradients import batch, gradients, loss_sum, micro, one_step, share, values
from torch import nn
from torch.utils.data import TensorDataset

import hora
from hora.errors import ConfigError
from hora.testing import run_ranks
from hora.testing.reference import assert_same


def normalised(momentum: float | None = 0.1, affine: bool = True) -> nn.Module:
    torch.manual_seed(4)
    return (
        nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6, momentum=momentum, affine=affine), nn.Tanh(), nn.Linear(6, 3))
        .double()
        .to(hora.device())
    )


def buffers(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: buffer.double() for name, buffer in model.named_buffers()}


@run_ranks(2, 3)
def test_ranks_with_other_numbers_of_micro_batches_are_told_before_they_wait_for_each_other() -> None:
    """13 samples, 6 a step: on 2 and 3 ranks the last step has a micro-batch on one rank alone."""
    model = hora.convert_sync_batch_norm(normalised())
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    train_step = hora.TrainStep(model, lambda model, batch, state: (loss_sum(model, *batch), len(batch[0]), {}, state), optimizer)
    dataset = TensorDataset(*(tensor.cpu() for tensor in batch(13)))

    for step in hora.DataLoader(dataset, global_batch_size=6, shuffle=False):
        held = step.hold()
        if step.index == 2:
            for begin in (lambda held: list(optimizer.micro_batches(held)), train_step):
                with pytest.raises(ConfigError, match=r"equally many micro-batches in each step, but in HeldStep\(.*they have 1, 0"):
                    begin(held)
            model.eval()
        for inputs, targets in optimizer.micro_batches(held):
            optimizer.backward(loss_sum(model, inputs.to(hora.device()), targets.to(hora.device())), weight=len(inputs))
        optimizer.step()
        train_step(held)


@pytest.mark.parametrize("strategy", ["deferred", "overlap"])
@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, False)])
@run_ranks(1, 2, 3, 4)
def test_sync_batch_norm_equals_one_process_on_the_global_batch(strategy: str, momentum: float | None, affine: bool) -> None:
    model = hora.convert_sync_batch_norm(normalised(momentum, affine))
    alone = normalised(momentum, affine)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, strategy=strategy, bucket_cap_bytes=128)
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    for seed in range(4):
        tensors = batch(9, seed)  # 9 on 2 or 4 ranks: batches of different sizes
        one_step(model, optimizer, tensors, 100)
        plain.zero_grad()
        (loss_sum(alone, *tensors) / 9).backward()
        assert_same(gradients(model), gradients(alone), 1e-9)
        optimizer.step()
        plain.step()
        assert_same(buffers(model), buffers(alone), 1e-9)
    assert_same(values(model), values(alone), 1e-9)


@run_ranks(1, 2, 3)
def test_sync_batch_norm_takes_images_and_is_local_in_evaluation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double().to(hora.device())
    synced = hora.convert_sync_batch_norm(copy.deepcopy(model))
    images = torch.randn(5, 3, 6, 6, dtype=torch.float64).to(hora.device())
    assert_same({"output": synced(share(images))}, {"output": share(model(images))}, 1e-9)
    synced.eval()
    if hora.rank() == 0:  # no other rank takes part
        assert synced(images).shape == (5, 4, 4, 4)


@run_ranks(1, 2, 3)
def test_running_statistics_of_local_batches_combine_by_weight() -> None:
    """Linear in the batches' statistics: the weighted mean over the ranks is what weighing each step's statistics gives."""
    model = normalised()
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.0), model)
    reference = normalised()[:2]
    expected = {name: torch.zeros_like(buffer) for name, buffer in reference.named_buffers()}
    tensors = batch(8)
    for _ in range(3):
        for x, y in optimizer.micro_batches(micro(tensors, 100)):
            optimizer.backward(loss_sum(model, x, y), weight=len(x))
    optimizer.sync_buffers()
    for part in tensors[0].tensor_split(hora.world_size()):
        one = normalised()[:2]
        for _ in range(3):
            one(part)
        for name, buffer in one.named_buffers():
            expected[name] = expected[name] + buffer * len(part) / 8
    assert_same(buffers(model), {name: value.round() if "num" in name else value for name, value in expected.items()}, 1e-9)


@run_ranks(2, 3)
def test_other_buffers_are_rank_zeros() -> None:
    model = nn.Module()
    model.register_buffer("counter", torch.tensor(hora.rank(), device=hora.device()))
    model.register_buffer("table", torch.full((3,), 0.1 + hora.rank(), device=hora.device()))
    hora.sync_buffers(model)
    assert model.counter.item() == 0
    assert torch.equal(model.table.cpu(), torch.full((3,), 0.1))
