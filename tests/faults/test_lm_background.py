"""The recipe saves in the background: signals, errors and a kill while rank 0 writes."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_lm_resume import assert_same_run, config_of, crash, stopped_run, terminate, texts  # noqa: F401 - a fixture too

import hora
from hora import env, events
from hora.errors import CheckpointError
from hora.recipes.lm.recipe import train
from hora.testing import run_ranks
from hora.train.checkpoint.storage import Storage
from hora.train.lock import DirectoryLock


class After(events.Observer):
    """Acts when step `step` of this process has been done."""

    def __init__(self, step: int, *acts: Callable[[], None]) -> None:
        self._step, self._acts = step, acts

    def on_step(self, *, step: int, values: dict[str, float]) -> None:
        if step == self._step - 1:
            for act in self._acts:
                act()


@contextmanager
def _each_commit(act: Callable[[], Any]) -> Iterator[None]:
    """Does `act` before a checkpoint that is written in the background appears."""
    commit = Storage.commit

    def act_and_commit(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            act()
        return commit(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "commit", act_and_commit)
        yield


def _refuse() -> None:
    raise OSError(5, "Input/output error")


def _names(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "checkpoints").iterdir())


@run_ranks(2)
def test_a_signal_waits_for_what_is_being_written(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    signalled = threading.Event()
    with _each_commit(lambda: signalled.wait(60)), events.observe(After(4, terminate, signalled.set)):
        assert train(config_of(texts, every_steps=3), tmp_path).preempted
    hora.barrier()
    assert _names(tmp_path) == ["step-00000003.g0", "step-00000005.g0"]


@run_ranks(2)
def test_a_signal_saves_although_the_save_before_has_failed(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    with _each_commit(_refuse), events.observe(After(4, terminate)):
        assert train(config_of(texts, every_steps=3), tmp_path).preempted
    hora.barrier()
    assert _names(tmp_path) == ["step-00000005.g0"]


@run_ranks(2)
def test_saves_that_fail_end_the_run_on_every_rank_and_the_next_start_goes_on(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    config = config_of(texts, every_steps=3)
    config = replace(config, checkpoint=replace(config.checkpoint, end_after_failed_saves=2))
    train(config, tmp_path / "whole")
    stopped_run(config, tmp_path / "parts", after=4)
    with _each_commit(_refuse), pytest.raises(CheckpointError, match=r"step 9 was to be saved in the background, but .*Input/output error"):
        train(config, tmp_path / "parts", resume=True)
    train(config, tmp_path / "parts", resume=True)
    hora.barrier()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@run_ranks(2)
def test_another_job_may_come_only_when_nothing_is_being_written(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    crashed, writing = threading.Event(), []
    release = DirectoryLock.release

    def look_and_release(lock: DirectoryLock) -> None:
        writing.append([thread.name for thread in threading.enumerate() if thread.name == "hora-checkpoint"])
        release(lock)

    def crash_and_tell() -> None:
        threading.Timer(0.1, crashed.set).start()
        crash()

    with (
        pytest.MonkeyPatch.context() as patch,
        _each_commit(lambda: crashed.wait(60)),
        events.observe(After(4, crash_and_tell)),
        pytest.raises(RuntimeError, match="crash"),
    ):
        patch.setattr(DirectoryLock, "release", look_and_release)
        train(config_of(texts, every_steps=3), tmp_path)
    assert writing == [[]]
    hora.barrier()
    assert _names(tmp_path) == ["step-00000003.g0"]


def _killed_run(texts: Path, path: Path) -> None:  # noqa: F811
    config = config_of(texts, every_steps=3)
    train(config, path / "whole")
    stopped_run(config, path / "parts", after=4)
    os.environ[env.FAULT] = "rank=0,point=checkpoint.fsynced,act=SIGKILL"
    events.arm_faults()
    train(config, path / "parts", resume=True)


def _next_start(texts: Path, path: Path) -> None:  # noqa: F811
    if hora.rank() == 0:
        assert _names(path / "parts")[-1] == "step-00000005.g0"
        assert len(_names(path / "parts")) == 3, "a draft was left, and whole ones before it"
        assert (path / "parts" / "lock").exists()
    hora.barrier()
    train(config_of(texts, every_steps=3), path / "parts", resume=True)
    hora.barrier()
    assert_same_run(path / "parts", path / "whole")
    assert not [name for name in _names(path / "parts") if name.startswith(".")]


def test_a_run_killed_while_it_writes_goes_on_over_its_stale_lock_and_draft(spawn_ranks, texts: Path, tmp_path: Path) -> None:  # noqa: F811
    struck, *_ = spawn_ranks(2, _killed_run, texts=texts, path=tmp_path).wait()
    assert struck.kind == "died", struck
    for outcome in spawn_ranks(2, _next_start, texts=texts, path=tmp_path).wait():
        assert not outcome.bad, outcome
