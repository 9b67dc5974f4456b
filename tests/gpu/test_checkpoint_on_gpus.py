"""Checkpoints of tensors and generators that live on GPUs."""

from pathlib import Path

import torch

import hora
from hora.testing import run_ranks
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.generators import capture_generators, restore_generators

WORLD_SIZES = [n for n in (1, 2, 4) if n <= torch.cuda.device_count()] or [1]


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
