"""Scripts may name a device with `torch.set_default_device`; here one that has no values, where nothing that Hora needs may land."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hora
from hora.testing import run_ranks


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("strategy", ["overlap", "sharded"])
@run_ranks(1, 2)
def test_a_script_trains_and_saves_where_another_device_is_the_default(strategy: str, tmp_path: Path) -> None:
    samples, here = torch.randn(13, 5), torch.ones(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    words = nn.Embedding(6, 3, sparse=True)
    with default_device("meta"):
        optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.1), model, strategy=strategy, clip_norm=1.0)
        sparse = hora.DistributedOptimizer(torch.optim.SGD(words.parameters(), 0.1), words)
        for step in hora.DataLoader(TensorDataset(samples), global_batch_size=5, micro_batch_size=2):
            held = step.hold()
            for (inputs,) in optimizer.micro_batches(held):
                optimizer.backward(model(inputs).square().sum(), weight=len(inputs))
            optimizer.step()
            for (inputs,) in sparse.micro_batches(held):
                sparse.backward(words(inputs[:, 0].abs().long() % 6).sum(), weight=len(inputs))
            sparse.step()
        optimizer.compare_replicas()
        optimizer.sync_buffers()
        train_step = hora.TrainStep(model, lambda model, batch, state: (model(batch).sum(), len(batch), {}, state), optimizer)
        assert train_step([samples]).loss.isfinite()
        hora.broadcast_object({"tensor": here, "array": here.numpy()})
        hora.all_gather(here[: hora.rank()])
        hora.all_reduce_coalesced([here.clone(), here.double()])
        hora.all_reduce(here.clone(), wire_dtype=torch.bfloat16)
        checkpointer = hora.Checkpointer(tmp_path / "checkpoints")
        checkpointer.prepare()
        checkpointer.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=1, epoch=0)
        restored = checkpointer.load().state
        model.load_state_dict(restored["model"])
        optimizer.load_state_dict(restored["optimizer"])
    assert all(parameter.device.type == "cpu" and parameter.isfinite().all() for parameter in model.parameters())


def _loaded(num_workers: int) -> list[float]:
    with default_device("meta"):
        steps = hora.DataLoader(TensorDataset(torch.arange(6.0, device="cpu")), global_batch_size=3, num_workers=num_workers)
        return sorted(value for step in steps for (batch,) in step for value in batch.tolist())


@run_ranks(1)
def test_workers_load_where_another_device_is_the_default() -> None:
    assert _loaded(0) == _loaded(1) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
