"""Saves that the disk refuses: training goes on, on all ranks alike, until too many in a row or the last one could not be written."""

import errno
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lm_background import After
from test_lm_resume import EPOCHS, STEPS, assert_same_run, config_of, terminate, texts  # noqa: F401 - a fixture too

import hora
from hora import events, log
from hora.cli.train_lm import LmRequest, train_as_rank
from hora.comm import session
from hora.errors import CheckpointError, CheckpointUnwritten, ConfigError
from hora.exits import FAILED, code_after
from hora.recipes.image import recipe as image
from hora.recipes.image.config import DataConfig, ImageConfig, SyntheticConfig
from hora.recipes.lm.config import LmConfig
from hora.recipes.lm.recipe import train
from hora.recipes.nmt import recipe as nmt
from hora.recipes.nmt.config import DataConfig as NmtDataConfig
from hora.recipes.nmt.config import ModelConfig, NmtConfig, OptimizerConfig, TrainingConfig
from hora.recipes.nmt.texts import EXCERPT
from hora.recipes.settings import CheckpointConfig
from hora.testing import run_ranks
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.checkpoint.manifest import CheckpointName
from hora.train.checkpoint.storage import Storage

ALL = range(1000)


@contextmanager
def refused(steps: Collection[int], number: int = errno.ENOSPC) -> Iterator[list[str]]:
    """The disk of rank 0 refuses the checkpoints of `steps`; gives the warnings of this rank."""
    commit, warnings = Storage.commit, []

    def refuse(storage: Storage, draft: Any, manifest: Any) -> Any:
        if manifest.step in steps:
            raise OSError(number, os.strerror(number))
        return commit(storage, draft, manifest)

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    log.get_logger().addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if hora.rank() == 0:
                patch.setattr(Storage, "commit", refuse)
            yield warnings
    finally:
        log.get_logger().removeHandler(handler)


def steps_in(path: Path) -> list[int]:
    hora.barrier()
    return [name.step for name in Storage(path).names()]


# Checkpointer -----------------------------------------------------------------------------------------------------------------------------


def _save(checkpointer: Checkpointer, step: int, **how: Any) -> Path | None:
    return checkpointer.save({"model": {"w": torch.ones(9)}}, step=step, epoch=0, **how)


@run_ranks(2)
def test_saves_that_fail_are_borne_by_all_ranks_until_so_many_in_a_row(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, end_after_failed_saves=3)
    with refused([2, 3, 5, 6, 7]) as warnings:
        assert _save(checkpointer, 1) == tmp_path / "step-00000001.g0"
        assert _save(checkpointer, 2) is None
        assert _save(checkpointer, 3, background=True) == tmp_path / "step-00000003.g0"
        assert checkpointer.saved_step() == 1
        if hora.rank() == 0:
            assert len(warnings) == 2, "it is told before the next save"
        assert _save(checkpointer, 4, background=True) is not None
        assert checkpointer.saved_step() == 4
        assert _save(checkpointer, 5) is _save(checkpointer, 6) is None
        _save(checkpointer, 7, background=True)
        with pytest.raises(
            CheckpointUnwritten, match=r"step 7 was .*No space left.*newest good one is step-00000004\.g0; failed saves in a row: 3$"
        ):
            _save(checkpointer, 8)
    assert len(warnings) == (4 if hora.rank() == 0 else 0)
    for warning, (step, count) in zip(warnings, ((2, 1), (3, 2), (5, 1), (6, 2)), strict=False):
        assert f"{tmp_path}/step-0000000{step}.g0 could not be written: [Errno 28] No space left on device; it needs " in warning
        assert f"newest good one is step-0000000{1 if step < 4 else 4}.g0; failed saves in a row: {count} of 3 that" in warning
    assert steps_in(tmp_path) == [1, 4]


@run_ranks(1, 2)
def test_a_final_save_is_tried_whatever_failed_before_and_must_succeed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, end_after_failed_saves=1)
    with refused([1, 3]) as warnings:
        _save(checkpointer, 1, background=True)
        assert _save(checkpointer, 2, final=True) == tmp_path / "step-00000002.g0"
        assert [warning for warning in warnings if "step 2 is tried all the same" in warning] == warnings
        checkpointer = Checkpointer(tmp_path, end_after_failed_saves=9)
        for background in (False, True):
            with pytest.raises(CheckpointUnwritten, match=r"newest good one is step-00000002\.g0"):
                _save(checkpointer, 3, final=True, background=background)
                checkpointer.wait()


@run_ranks(1, 2)
def test_a_block_does_not_end_well_after_a_last_save_that_was_borne(tmp_path: Path) -> None:
    for background in (False, True):
        checkpointer = Checkpointer(tmp_path / str(background), end_after_failed_saves=3)
        with refused([1, 3]), pytest.raises(CheckpointUnwritten, match=r"step-00000003\.g0 could not be written"), checkpointer:
            for step in (1, 2, 3):
                _save(checkpointer, step, background=background)
        with checkpointer:
            _save(checkpointer, 4)


@run_ranks(1, 2)
def test_what_is_no_failure_of_the_disk_ends_at_once(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, end_after_failed_saves=9)
    for number in (errno.ENOTEMPTY, errno.ENOENT):  # another job has taken the name, or taken the draft away
        with refused(ALL, number), pytest.raises(CheckpointError) as caught:
            _save(checkpointer, 1)
        assert type(caught.value) is CheckpointError
    with refused(ALL, errno.ENOTEMPTY), pytest.raises(CheckpointError, match="step 1 was to be saved.*Directory not empty") as caught:
        _save(checkpointer, 1, background=True)
        _save(checkpointer, 2, final=True)
    assert type(caught.value) is CheckpointError
    _save(checkpointer, 3)
    Checkpointer(tmp_path).prepare()
    if hora.rank() == 0:
        (tmp_path / "step-00000001.g7").mkdir()
    hora.barrier()
    with pytest.raises(CheckpointError, match="the run was started again and this process must end") as caught:
        _save(checkpointer, 4, final=True)
    assert type(caught.value) is CheckpointError
    with pytest.raises(ConfigError, match="end_after_failed_saves must be at least 1, but is 0"):
        Checkpointer(tmp_path, end_after_failed_saves=0)


@run_ranks(1, 2)
def test_a_directory_that_cannot_be_read_is_a_save_that_failed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, end_after_failed_saves=2)
    _save(checkpointer, 1)

    def fail(_: Storage) -> list[CheckpointName]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "names", fail)
        assert _save(checkpointer, 2) is None
        with pytest.raises(CheckpointUnwritten, match=r"step 3 could not be saved.*Input/output.*newest good one is step-00000001\.g0"):
            _save(checkpointer, 3)
    _save(checkpointer, 4)
    assert steps_in(tmp_path) == [1, 4]


@run_ranks(1)
def test_what_cannot_be_tidied_up_is_no_save_that_failed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    names, asked = Storage.names, []

    def fail_after_the_write(storage: Storage) -> list[CheckpointName]:
        asked.append(1)
        if len(asked) > 2:  # for the number of this start, and for the name
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return names(storage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "names", fail_after_the_write)
        assert _save(checkpointer, 1) is not None
    assert len(asked) == 3


# hora train lm ----------------------------------------------------------------------------------------------------------------------------


def _patient(texts: Path, every_steps: int, **keep: Any) -> LmConfig:  # noqa: F811
    config = config_of(texts, every_steps=every_steps)
    return replace(config, checkpoint=replace(config.checkpoint, **keep))


@run_ranks(2)
def test_lm_goes_on_where_one_rank_cannot_write_and_is_the_same_run(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    config = _patient(texts, 6)
    train(config, tmp_path / "whole")
    with refused([6, 12, 18]) as warnings:
        assert train(config, tmp_path / "run").test is not None
    assert len(warnings) == (3 if hora.rank() == 0 else 0)
    assert steps_in(tmp_path / "run" / "checkpoints") == [13, 24, 26]
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@run_ranks(2)
def test_lm_ends_where_its_last_state_is_not_saved_and_goes_on_from_the_newest(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    config = _patient(texts, 8)
    with refused([EPOCHS * STEPS]), pytest.raises(CheckpointUnwritten, match=r"newest good one is step-00000024\.g0") as caught:
        train(config, tmp_path)
    assert code_after(caught.value) == FAILED
    assert train(config, tmp_path, resume=True).test is not None
    assert steps_in(tmp_path / "checkpoints")[-1] == EPOCHS * STEPS


@run_ranks(2)
def test_a_signal_is_no_save_where_nothing_could_be_saved(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    with (
        refused([3, 5], errno.EROFS),
        events.observe(After(4, terminate)),
        pytest.raises(CheckpointUnwritten, match="Read-only file system.*there is no good one before it"),
    ):
        train(_patient(texts, 3, end_after_failed_saves=9), tmp_path)
    assert steps_in(tmp_path / "checkpoints") == []


@run_ranks(1)
def test_the_command_does_not_say_saved_where_nothing_could_be_saved(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ("epochs=1", "model.hidden_size=4", "data.max_vocabulary=50", "data.rows=2", "data.window=4", "tensorboard=false")
    with pytest.MonkeyPatch.context() as patch, refused(ALL) as warnings:
        patch.setattr(session, "init", lambda **_: None)  # the test's own session is in force
        patch.setattr(session, "shutdown", lambda: None)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # set by a rank for itself
        with events.observe(After(2, terminate)), pytest.raises(CheckpointUnwritten, match=r"step-00000003\.g0 could not be written"):
            train_as_rank(LmRequest(config="small", data=str(texts), overrides=words, run_dir=tmp_path / "run"))
    assert warnings == []
    assert not (tmp_path / "run" / "lock").exists()


# hora train image -------------------------------------------------------------------------------------------------------------------------


@run_ranks(1)
def test_image_goes_on_and_its_best_is_one_that_was_written(tmp_path: Path) -> None:
    data = DataConfig("synthetic", global_batch_size=8, synthetic=SyntheticConfig(samples=24, channels=1, size=8))
    config = ImageConfig(epochs=3, data=data, checkpoint=CheckpointConfig(keep_last=1, background=False), tensorboard=False)
    steps = 3  # of an epoch
    with refused([steps, 2 * steps]) as warnings:
        assert len(image.train(config, tmp_path / "a").test) == 3
    assert len(warnings) == 2
    assert steps_in(tmp_path / "a" / "checkpoints") == [3 * steps]
    assert Checkpointer(tmp_path / "a" / "checkpoints", best="max").load("best").manifest.step == 3 * steps
    with refused([3 * steps]), pytest.raises(CheckpointUnwritten, match=r"newest good one is step-00000006\.g0"):
        image.train(config, tmp_path / "b")


# hora train nmt ---------------------------------------------------------------------------------------------------------------------------


def _nmt(tmp_path: Path, **training: Any) -> NmtConfig:
    """A run that changes nothing, so that no validation is better than the first."""
    for split, (first, last) in {"train": (0, 40), "valid": (40, 44)}.items():
        for language in ("en", "de"):
            lines = (EXCERPT / f"train.{language}").read_text(encoding="utf-8").split("\n")[first:last]
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = [(str(tmp_path / f"{split}.en"), str(tmp_path / f"{split}.de")) for split in ("train", "valid")]
    how = TrainingConfig(batch_size=8, valid_batch_size=8, loss_valid_freq=1, max_epochs=99, num_kept_checkpoints=9, tensorboard=False)
    return NmtConfig(
        NmtDataConfig(*files, cache=str(tmp_path / "cache")),
        ModelConfig(n_layers=1, n_head=2, d_word_vec=8, d_model=8, d_inner_hid=16, dropout=0.0),
        OptimizerConfig("sgd", 1e-30),
        replace(how, **training),
    )


@run_ranks(1)
def test_nmt_goes_on_and_a_best_that_was_not_written_is_none(tmp_path: Path) -> None:
    config = _nmt(tmp_path, early_stop_patience=2)
    assert list(nmt.train(config, tmp_path / "whole").valid) == [1, 2, 3]
    for background in (True, False):
        path = tmp_path / f"background {background}"
        config = replace(config, training_configs=replace(config.training_configs, background=background))
        with refused([1]) as warnings:
            report = nmt.train(config, path)
        assert report.stopped_early
        assert list(report.valid) == [1, 2, 3, 4], "the one that was not written is not the best"
        assert len(warnings) == 1
        assert steps_in(path / "checkpoints") == [2, 3, 4]
        assert Checkpointer(path / "checkpoints").load("best").manifest.step == 2
        assert Checkpointer(path / "checkpoints").load().manifest.metric == report.valid[4]


@run_ranks(1)
def test_nmt_ends_after_so_many_and_where_its_last_state_is_not_saved(tmp_path: Path) -> None:
    config = _nmt(tmp_path, max_steps=4, end_after_failed_saves=2)
    longer = replace(config, training_configs=replace(config.training_configs, max_steps=5))
    with refused([2, 3]), pytest.raises(CheckpointUnwritten, match=r"newest good one is step-00000001\.g0; failed saves in a row: 2"):
        nmt.train(longer, tmp_path / "a")
    with refused([3, 4]), pytest.raises(CheckpointUnwritten, match=r"step 4 was .*newest good one is step-00000002\.g0"):
        nmt.train(config, tmp_path / "b")
    once = replace(config, training_configs=replace(config.training_configs, end_after_failed_saves=1))
    with refused([3]) as warnings:
        nmt.train(once, tmp_path / "c")
    assert "step 4 is tried all the same, as the last one" in warnings[0]
    assert steps_in(tmp_path / "c" / "checkpoints") == [1, 2, 4]
    with refused(ALL), events.observe(After(1, terminate)), pytest.raises(CheckpointUnwritten, match="there is no good one before it"):
        nmt.train(config, tmp_path / "d")
