"""Checkpoints of tensors and generators that live on GPUs."""

import threading
from pathlib import Path

import gpu_ranks
import pytest
import torch

import hora
from hora.testing import run_ranks
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.checkpoint.content import Entry
from hora.train.checkpoint.snapshot import Snapshot
from hora.train.checkpoint.storage import Storage
from hora.train.generators import capture_generators, restore_generators

WORLD_SIZES = [n for n in (1, 2, 4) if n in gpu_ranks.WORLD_SIZES]


@run_ranks(*WORLD_SIZES, backend="nccl", timeout_s=120)
def test_tensors_on_gpus_are_given_to_every_rank_on_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = {str(dtype): torch.randn(1000, device=hora.device()).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.bool)}
    values["channels_last"] = torch.randn(2, 3, 4, 5, device=hora.device()).to(memory_format=torch.channels_last)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"model": values}, step=1, epoch=0, rank_state={"own": values["torch.float32"] + hora.rank()})
    restored = checkpointer.load()
    assert torch.equal(restored.rank_state["own"], (values["torch.float32"] + hora.rank()).cpu())
    for name, tensor in values.items():
        loaded = restored.state["model"][name]
        assert loaded.device.type == "cpu"
        assert torch.equal(loaded, tensor.cpu())


@run_ranks(*WORLD_SIZES, backend="nccl", timeout_s=120)
def test_every_gpu_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    torch.cuda.manual_seed(hora.rank())
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({}, step=1, epoch=0, rank_state=capture_generators(hora.device()))
    expected = torch.rand(100, device=hora.device())
    restore_generators(checkpointer.load().rank_state, hora.device())
    assert torch.equal(torch.rand(100, device=hora.device()), expected)


@run_ranks(*WORLD_SIZES, backend="nccl", timeout_s=120)
def test_no_memory_is_taken_on_the_gpus_of_others(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(
        {"model": {"w": torch.ones(1000, device=hora.device())}}, step=1, epoch=0, rank_state=capture_generators(hora.device())
    )
    restore_generators(checkpointer.load().rank_state, hora.device())
    others = [index for index in range(torch.cuda.device_count()) if index != hora.device().index]
    assert all(torch.cuda.memory_reserved(index) == 0 for index in others)


def _occupy(device: torch.device) -> torch.cuda.Event:
    """Gives the current stream work for a good while; the event comes when it is done."""
    factor = torch.randn(8192, 8192, device=device)
    for _ in range(100):
        factor = torch.nn.functional.normalize(factor @ factor)
    done = torch.cuda.Event()
    done.record()
    return done


@run_ranks(1, backend="nccl", timeout_s=120)
def test_the_host_does_not_wait_for_the_copies_and_later_updates_do() -> None:
    weight = torch.zeros(10_000_019, device=hora.device())
    turned = torch.zeros(1000, 3001, device=hora.device()).t()
    entry = Entry("model", {}, {"weight": weight, "turned": turned, "host": torch.ones(3)})
    Snapshot.take([entry]).wait()  # pinned memory is kept for the next one
    _occupy(hora.device()).synchronize()
    done = _occupy(hora.device())
    for tensor in (weight, turned):
        tensor.add_(1)
    snapshot = Snapshot.take([entry])
    for tensor in (weight, turned):
        tensor.add_(1)
    assert not done.query(), "the host has waited"
    snapshot.wait()
    assert done.query()
    copies = snapshot.entries[0].tensors
    assert copies["weight"].is_pinned()
    assert torch.equal(copies["weight"], torch.ones(10_000_019))
    assert torch.equal(copies["turned"], torch.ones(3001, 1000))
    assert torch.equal(weight.cpu(), torch.full((10_000_019,), 2.0))


@run_ranks(*WORLD_SIZES, backend="nccl", timeout_s=120)
def test_what_is_saved_in_the_background_is_what_a_synchronous_save_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).to(hora.device())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def update() -> None:
        optimizer.zero_grad()
        model(torch.ones(64, 512, device=hora.device())).square().sum().backward()
        optimizer.step()

    update()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = Checkpointer(tmp_path / "synchronous").save(state, step=1, epoch=0)
    go_on, write = threading.Event(), Storage.write

    def wait_and_write(storage: Storage, *arguments: object) -> object:
        assert go_on.wait(60)
        return write(storage, *arguments)

    with pytest.MonkeyPatch.context() as patch, Checkpointer(tmp_path / "background") as checkpointer:
        patch.setattr(Storage, "write", wait_and_write)
        path = checkpointer.save(state, step=1, epoch=0, background=True)
        for _ in range(5):
            update()
        go_on.set()
    if hora.rank() == 0:
        for file in saved.iterdir():
            assert file.name == "manifest.json" or file.read_bytes() == (path / file.name).read_bytes(), file.name
