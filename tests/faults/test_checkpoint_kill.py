"""Rank 0 is killed at each named point of a save: the next start finds the old checkpoint or the new one."""

import os
import signal
from pathlib import Path

import pytest
import torch

import hora
from hora.train.checkpoint.checkpointer import Checkpointer


def _save_once_more(directory: Path) -> None:
    checkpointer = Checkpointer(directory)
    checkpointer.load()
    checkpointer.save({"model": {"w": torch.full((10_000,), 2.0)}}, step=2, epoch=0, rank_state=hora.rank())


def _save_first(directory: Path) -> None:
    Checkpointer(directory).save({"model": {"w": torch.full((10_000,), 1.0)}}, step=1, epoch=0, rank_state=hora.rank())


def _go_on(directory: Path, step: int) -> None:
    checkpointer = Checkpointer(directory, keep_last=1)
    checkpointer.prepare()
    restored = checkpointer.load()
    assert restored.manifest.step == step
    assert torch.equal(restored.state["model"]["w"], torch.full((10_000,), float(step)))
    assert restored.rank_state == hora.rank()
    path = checkpointer.save({"model": {}}, step=3, epoch=0)
    assert os.listdir(directory) == [path.name]


@pytest.mark.parametrize(("point", "step"), [("opened", 1), ("written", 1), ("fsynced", 1), ("committed", 2)])
def test_a_kill_leaves_the_old_or_the_new(spawn_ranks, tmp_path, point, step):
    (first, *_) = spawn_ranks(2, _save_first, directory=tmp_path).wait()
    assert not first.bad, first
    fault = f"rank=0,point=checkpoint.{point},act=SIGKILL"
    (struck, *_) = spawn_ranks(2, _save_once_more, directory=tmp_path, environ={"HORA_FAULT": fault}).wait()
    assert struck.kind == "died", struck
    assert signal.Signals.SIGKILL.name in str(struck), struck
    for outcome in spawn_ranks(2, _go_on, directory=tmp_path, step=step).wait():
        assert not outcome.bad, outcome


def test_an_injected_error_is_told_to_every_rank_and_leaves_no_draft(spawn_ranks, tmp_path):
    spawn_ranks(2, _save_first, directory=tmp_path).wait()
    fault = "rank=0,point=checkpoint.written,act=raise"
    for outcome in spawn_ranks(2, _save_once_more, directory=tmp_path, environ={"HORA_FAULT": fault}).wait():
        assert "injected fault at checkpoint.written" in str(outcome), outcome
    assert os.listdir(tmp_path) == ["step-00000001.g0"]
