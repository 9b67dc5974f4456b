"""Checkpoints in a directory that several machines share and that shows late what was written: a listing, a file, a rename."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hora
from hora import log
from hora.errors import CheckpointError
from hora.testing import run_ranks
from hora.train.checkpoint import storage
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.checkpoint.manifest import CheckpointName
from hora.train.checkpoint.storage import Storage


@contextmanager
def _unlisted(*hidden: CheckpointName) -> Iterator[None]:
    """Listings do not have these yet."""
    names = Storage.names
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "names", lambda here: [name for name in names(here) if name not in hidden])
        yield


@contextmanager
def _unreadable(word: str, number: int) -> Iterator[list[str]]:
    """Files with `word` in their path cannot be opened; gives the warnings."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    open_regular = storage.open_regular

    def refuse(path: Path) -> Any:
        if word in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return open_regular(path)

    log.get_logger().addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "open_regular", refuse)
            yield messages
    finally:
        log.get_logger().removeHandler(handler)


def _save(directory: Path, steps: range) -> Checkpointer:
    checkpointer = Checkpointer(directory, keep_last=3)
    for step in steps:
        checkpointer.save({"model": {"step": step}}, step=step, epoch=0)
    return checkpointer


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@run_ranks(2)
def test_a_listing_without_the_newest_gives_the_one_before(tmp_path: Path) -> None:
    _save(tmp_path, range(1, 3))
    with _unlisted(CheckpointName(0, 2)):
        assert Checkpointer(tmp_path).load().state["model"]["step"] == 1
    assert Checkpointer(tmp_path).load().state["model"]["step"] == 2


@run_ranks(1, 2)
def test_an_unlisted_checkpoint_is_not_overwritten_and_the_error_says_why(tmp_path: Path) -> None:
    _save(tmp_path, range(1, 3))
    with _unlisted(CheckpointName(0, 1), CheckpointName(0, 2)):
        checkpointer = Checkpointer(tmp_path)
        for background in (False, True):
            with pytest.raises(
                CheckpointError, match=r"a checkpoint of that name is there already: .*the directory is shared and listed it late"
            ):
                checkpointer.save({"model": {"step": -2}}, step=2, epoch=0, background=background)
                checkpointer.wait()
    hora.barrier()
    assert _names(tmp_path) == ["step-00000001.g0", "step-00000002.g0"]
    assert Checkpointer(tmp_path).load().state["model"]["step"] == 2


@run_ranks(2)
@pytest.mark.parametrize("background", [False, True])
def test_what_a_run_has_written_itself_it_need_not_see(tmp_path: Path, background: bool) -> None:
    checkpointer = _save(tmp_path, range(1))
    with _unlisted(CheckpointName(0, 1)):
        for metric in (None, 0.5):
            checkpointer.save({"model": {}}, step=1, epoch=0, metric=metric, background=background)
        checkpointer.wait()
    assert _names(tmp_path) == ["step-00000000.g0", "step-00000001.g0", "step-00000001.g1"]


@run_ranks(2)
@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_newest_that_cannot_be_read_yet_gives_the_one_before_and_a_warning_that_says_why(tmp_path: Path, file: str, number: int) -> None:
    _save(tmp_path, range(1, 3))
    with _unreadable(f"step-00000002.g0/{file}", number) as warnings:
        assert Checkpointer(tmp_path).load().state["model"]["step"] == 1
    if hora.rank() == 0:
        (warning,) = warnings
        assert f"{file}: {os.strerror(number)}; falling back to the one before" in warning.replace(f"'{tmp_path}/", "")
    assert Checkpointer(tmp_path).load().state["model"]["step"] == 2
    with (
        _unreadable("step-", number),
        pytest.raises(CheckpointError, match="no whole checkpoint in .*: each of step-00000002.g0, step-00000001.g0 is"),
    ):
        Checkpointer(tmp_path).load()
