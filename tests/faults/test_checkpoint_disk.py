"""Saving where the disk is full, read-only or small: every rank is told, and what was saved before stays."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hora
from hora.errors import CheckpointError
from hora.testing import run_ranks
from hora.train.checkpoint.checkpointer import Checkpointer


@contextmanager
def _mounted(path: Path, *options: str) -> Iterator[None]:
    """A file system in memory at `path`, made by rank 0; all ranks enter and leave together."""
    if hora.rank() == 0:
        path.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(path)], capture_output=True, check=False).returncode == 0
    else:
        mounted = False
    if not hora.broadcast_object(mounted):
        pytest.skip("mounting a small file system needs root")
    try:
        yield
        hora.barrier()
    finally:
        if hora.rank() == 0:
            subprocess.run(["umount", str(path)], check=True)


def _state(size_bytes: int) -> dict:
    return {"model": {"w": torch.ones(size_bytes, dtype=torch.uint8)}}


@run_ranks(1, 2)
def test_a_full_disk_is_told_to_every_rank_and_costs_nothing(tmp_path: Path) -> None:
    with _mounted(tmp_path / "small", "-o", "size=1m"):
        directory = tmp_path / "small" / "checkpoints"
        checkpointer = Checkpointer(directory)
        checkpointer.save(_state(300_000), step=1, epoch=0)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(_state(2_000_000), step=2, epoch=0)
        for word in ("step-00000002.g0 could not be written", "No space left on device", "it needs 2000", "are free", "are untouched"):
            assert word in str(caught.value)
        assert os.listdir(directory) == ["step-00000001.g0"]
        assert torch.equal(checkpointer.load().state["model"]["w"], torch.ones(300_000, dtype=torch.uint8))
        checkpointer.save(_state(300_000), step=3, epoch=0)
        checkpointer.save(_state(2_000_000), step=4, epoch=0, background=True)
        with pytest.raises(
            CheckpointError, match=r"step 4 was to be saved in the background, but .*No space left on device.*; it needs 2000"
        ):
            checkpointer.wait()
        assert checkpointer.load().manifest.step == 3
        with pytest.raises(CheckpointError, match="must have room for two checkpoints"):
            checkpointer.prepare(size_bytes=600_000)


@run_ranks(1, 2)
def test_a_read_only_disk_is_refused_before_the_first_step_and_can_be_loaded_from(tmp_path: Path) -> None:
    with _mounted(tmp_path / "small", "-o", "size=1m"):
        directory = tmp_path / "small" / "checkpoints"
        Checkpointer(directory).save(_state(1000), step=1, epoch=0)
        hora.barrier()
        if hora.rank() == 0:
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "small")], check=True)
        checkpointer = Checkpointer(directory)
        assert checkpointer.load().manifest.step == 1
        with pytest.raises(CheckpointError, match=r"checkpoints cannot be written in .*Read-only file system.*; choose another directory"):
            checkpointer.prepare()
        with pytest.raises(CheckpointError, match="Read-only file system"):
            checkpointer.save(_state(1000), step=2, epoch=0)
        checkpointer.save(_state(1000), step=2, epoch=0, background=True)
        with pytest.raises(CheckpointError, match=r"step 2 was to be saved in the background, but .*Read-only file system"):
            checkpointer.wait()


@run_ranks(1, 2)
def test_a_limit_on_file_sizes_is_told_like_a_full_disk(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(_state(1000), step=1, epoch=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written: .*File too large.*; it needs 200\d\d\d bytes"):
            checkpointer.save(_state(200_000), step=2, epoch=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["step-00000001.g0"]
    checkpointer.save(_state(200_000), step=2, epoch=0)
    assert checkpointer.load().manifest.step == 2
