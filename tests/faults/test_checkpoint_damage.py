"""Checkpoints on a disk that forgets: flipped bits, cut files, swapped files."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hora
from hora import log
from hora.errors import CheckpointError, CheckpointIncomplete, CheckpointMismatch
from hora.testing import run_ranks
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.checkpoint.manifest import FileFacts, Manifest
from hora.train.checkpoint.storage import Storage, verify
from hora.train.checkpoint.tensors import TensorFile


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    storage = Storage(tmp_path_factory.mktemp("checkpoints"))
    manifest = Manifest(1, "0", "0", 7, 0, 0, 1, 1, None, "a machine", None, "", {})
    with storage.write(manifest.name) as draft:
        draft.add("model.safetensors", TensorFile("model.safetensors", {"w": torch.randn(5), "n": torch.tensor(3)}).chunks())
        draft.add("model.json", [b'{"w": {"$tensor": "w"}, "n": {"$tensor": "n"}}'])
        return storage.commit(draft, Manifest(1, "0", "0", 7, 0, 0, 1, 1, None, "a machine", None, "", draft.files))


FILES = ("manifest.json", "model.safetensors", "model.json")


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_seen(copy, file):
    content = bytearray((copy / file).read_bytes())
    missed = []
    with (copy / file).open("r+b", buffering=0) as disk:
        for position in range(len(content)):
            for bit in range(8):
                os.pwrite(disk.fileno(), bytes([content[position] ^ 1 << bit]), position)
                try:
                    verify(copy)
                    missed.append((position, bit))
                except CheckpointIncomplete:
                    pass
            os.pwrite(disk.fileno(), content[position : position + 1], position)
    assert missed == []
    verify(copy)


@pytest.mark.parametrize("file", FILES)
def test_every_truncation_and_every_addition_is_seen(copy, file):
    content = (copy / file).read_bytes()
    for other in [*(content[:length] for length in range(len(content))), content + b"\n", content + b"\x00"]:
        (copy / file).write_bytes(other)
        with pytest.raises(CheckpointIncomplete, match=r"step-00000007\.g0 is damaged"):
            verify(copy)


def test_files_that_changed_places_are_seen(copy):
    (copy / "model.json").rename(copy / "x")
    (copy / "model.safetensors").rename(copy / "model.json")
    (copy / "x").rename(copy / "model.safetensors")
    with pytest.raises(CheckpointIncomplete):
        verify(copy)


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    handler = _Collect()
    log.get_logger().addHandler(handler)
    try:
        yield handler.messages
    finally:
        log.get_logger().removeHandler(handler)


def _save(directory: Path, steps: range) -> Checkpointer:
    checkpointer = Checkpointer(directory, keep_last=len(steps))
    for step in steps:
        checkpointer.save({"model": {"w": torch.full((1000,), step), "step": step}}, step=step, epoch=0, metric=float(step))
    return checkpointer


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@run_ranks(1, 2)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_latest_falls_back_with_a_warning_that_names_the_file(tmp_path: Path, file: str) -> None:
    _save(tmp_path, range(3))
    if hora.rank() == 0:
        _flip(tmp_path / "step-00000002.g0" / file)
    with _warnings() as warnings:
        restored = Checkpointer(tmp_path).load()
    assert restored.state["model"]["step"] == 1
    assert torch.equal(restored.state["model"]["w"], torch.full((1000,), 1))
    if hora.rank() == 0:
        (warning,) = warnings
        assert str(tmp_path / "step-00000002.g0") in warning
        assert file in warning
        assert "falling back to the one before" in warning


@run_ranks(2)
def test_a_damaged_best_falls_back_to_the_next_best(tmp_path: Path) -> None:
    _save(tmp_path, range(3))
    if hora.rank() == 0:
        _flip(tmp_path / "step-00000000.g0" / "model.safetensors")
    with _warnings():
        assert Checkpointer(tmp_path).load("best").state["model"]["step"] == 1


@run_ranks(1, 2)
def test_if_all_are_damaged_every_rank_is_told(tmp_path: Path) -> None:
    _save(tmp_path, range(2))
    if hora.rank() == 0:
        (tmp_path / "step-00000000.g0" / "manifest.json").unlink()
        (tmp_path / "step-00000001.g0" / "model.json").unlink()
    with (
        _warnings(),
        pytest.raises(CheckpointError, match=r"no whole checkpoint in .*: each of step-00000001\.g0, step-00000000\.g0 is damaged"),
    ):
        Checkpointer(tmp_path).load()
    with pytest.raises(CheckpointIncomplete, match="model.json: No such file"):
        Checkpointer(tmp_path).load(tmp_path / "step-00000001.g0")


@run_ranks(2)
def test_after_a_fall_back_the_damaged_one_makes_room_for_a_whole_one(tmp_path: Path) -> None:
    _save(tmp_path, range(3))
    if hora.rank() == 0:
        _flip(tmp_path / "step-00000002.g0" / "model.json")
    checkpointer = Checkpointer(tmp_path, keep_last=2, keep_best=0)
    with _warnings():
        checkpointer.load()
    checkpointer.save({"model": {}}, step=2, epoch=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.g0", "step-00000002.g1"]


@run_ranks(2)
def test_a_newer_format_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    _save(tmp_path, range(1))
    newer = Manifest(2, "9", "9", 1, 0, 0, 1, 1, None, "a machine", None, "", {"model.json": FileFacts(0, "0" * 64)})
    if hora.rank() == 0:
        (tmp_path / "step-00000001.g0").mkdir()
        (tmp_path / "step-00000001.g0" / "manifest.json").write_bytes(newer.render())
    with pytest.raises(CheckpointMismatch, match="must have format 1, but has 2"):
        Checkpointer(tmp_path).load()
