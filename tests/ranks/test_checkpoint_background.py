"""Checkpoints that rank 0 writes in a thread while training goes on."""

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hora
from hora import log
from hora.errors import CheckpointError, ConfigError
from hora.testing import run_ranks
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.checkpoint.storage import Storage


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Keeps what is written in the background from beginning until the function that is given has been called, or the block ends."""
    go_on = threading.Event()
    write = Storage.write

    def wait_and_write(storage: Storage, *arguments: Any) -> Any:
        assert threading.current_thread() is threading.main_thread() or go_on.wait(60)
        return write(storage, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "write", wait_and_write)
        try:
            yield go_on.set
        finally:
            go_on.set()


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 7)).square().sum().backward()
        optimizer.step()

    return model, optimizer, update


def _facts(path: Path) -> dict[str, Any]:
    facts = json.loads((path / "manifest.json").read_text())
    return {key: value for key, value in facts.items() if key not in ("created", "sha256")}


@run_ranks(1, 3)
def test_the_bytes_are_those_of_a_synchronous_save_although_training_goes_on(tmp_path: Path) -> None:
    model, optimizer, update = _training()
    update()
    odd = {
        "turned": torch.arange(6.0).view(2, 3).t(),
        "same": torch.ones(1).expand(1000),
        "mirror": torch.tensor([1 + 2j]).conj(),
        "none": torch.ones(0),
    }
    counters = {"step": 1, "seen": [1, 2]}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "odd": odd, "counters": counters}
    own = torch.full((3,), float(hora.rank()))
    saved = Checkpointer(tmp_path / "synchronous").save(state, step=1, epoch=0, rank_state=own)
    with held() as go_on, Checkpointer(tmp_path / "background") as checkpointer:
        path = checkpointer.save(state, step=1, epoch=0, rank_state=own, background=True)
        for _ in range(3):
            update()
        for tensor in (own, odd["turned"], odd["mirror"]):
            tensor.zero_()
        counters["seen"].append(3)
        go_on()
    if hora.rank() == 0:
        assert path == tmp_path / "background" / saved.name
        assert _facts(path) == _facts(saved)  # with the digests of all files
    hora.barrier()
    restored = checkpointer.load()
    assert restored.state["counters"] == {"step": 1, "seen": [1, 2]}
    assert not torch.equal(restored.state["model"]["0.weight"], model.state_dict()["0.weight"])


@run_ranks(1, 2)
def test_a_save_or_a_load_waits_for_the_one_before(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=2, keep_best=0)
    with held() as go_on:
        checkpointer.save({"model": {"step": 1}}, step=1, epoch=0, background=True)
        assert _names(tmp_path) == []
        if hora.rank() == 0:
            threading.Timer(0.05, go_on).start()
        checkpointer.save({"model": {"step": 2}}, step=2, epoch=0)
    assert _names(tmp_path) == ["step-00000001.g0", "step-00000002.g0"]
    with held() as go_on:
        checkpointer.save({"model": {"step": 3}}, step=3, epoch=0, background=True)
        if hora.rank() == 0:
            threading.Timer(0.05, go_on).start()
        assert checkpointer.load().state["model"]["step"] == 3
    assert _names(tmp_path) == ["step-00000002.g0", "step-00000003.g0"]
    checkpointer.wait()


@run_ranks(1, 2)
def test_an_error_of_the_thread_is_told_to_every_rank_once_and_names_the_step(tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    def fail(*_: Any) -> None:
        raise MemoryError("none left")

    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"model": {}}, step=1, epoch=0)
    for step, act, words in ((2, refuse, "could not be written: .*Input/output error; it needs"), (3, fail, "MemoryError.'none left'")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Storage, "commit", act)
            checkpointer.save({"model": {}}, step=step, epoch=0, background=True)
            told = rf"step {step} was to be saved in the background, but checkpoint .*step-0000000{step}.g0 {words}|{words}"
            with pytest.raises(CheckpointError, match=told) as caught:
                checkpointer.save({"model": {}}, step=9, epoch=0)
            assert f"step {step} was to be saved" in str(caught.value)
        hora.barrier()
        assert _names(tmp_path) == ["step-00000001.g0"]
    checkpointer.wait()
    checkpointer.save({"model": {}}, step=4, epoch=0, background=True)
    checkpointer.wait()
    assert checkpointer.load().manifest.step == 4


@run_ranks(1, 2)
def test_what_cannot_be_kept_is_refused_before_anything_is_written_in_the_background(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ConfigError, match=r"layers\.0 must be"):
            checkpointer.save({"model": {"layers": [object()]}}, step=1, epoch=0, background=True)
        with pytest.raises(ConfigError, match="cannot hold tensors of these names and types"):
            checkpointer.save({"model": {"__metadata__": torch.ones(1)}}, step=1, epoch=0, background=True)
    assert _names(tmp_path) == []


@run_ranks(2)
def test_a_rank_that_fails_alone_leaves_what_was_being_written_whole(tmp_path: Path) -> None:
    """Nothing of the other ranks is waited for: only rank 0 leaves its block with an error."""
    checkpointer = Checkpointer(tmp_path)
    if hora.rank() == 0:
        with held() as go_on, pytest.raises(ZeroDivisionError), checkpointer:
            checkpointer.save({"model": {"step": 1}}, step=1, epoch=0, background=True)
            go_on()
            raise ZeroDivisionError
        assert _names(tmp_path) == ["step-00000001.g0"]
    else:
        checkpointer.save({"model": {"step": 1}}, step=1, epoch=0, background=True)
    hora.barrier()
    assert checkpointer.load().state["model"]["step"] == 1


@run_ranks(1)
def test_a_second_error_is_a_warning(tmp_path: Path) -> None:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    log.get_logger().addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpointer:
            patch.setattr(Storage, "commit", lambda *_: 1 // 0)
            checkpointer.save({"model": {}}, step=7, epoch=0, background=True)
            raise ZeroDivisionError
    finally:
        log.get_logger().removeHandler(handler)
    assert len(messages) == 1
    assert "step 7 was to be saved in the background" in messages[0]


@run_ranks(2)
def test_the_thread_calls_nothing_of_torch_distributed(tmp_path: Path) -> None:
    called: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_globals.get("__name__", ""))

    threading.setprofile(note)
    try:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save({"model": {"w": torch.ones(5)}}, step=1, epoch=0, rank_state=hora.rank(), background=True)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert ("hora.train.checkpoint.writer" in called) == (hora.rank() == 0)
    assert {name for name in called if name.startswith(("torch.distributed", "hora.comm"))} <= {"hora.comm.owner"}


@run_ranks(1, 2)
def test_tensors_in_parts_may_change_while_they_are_written(tmp_path: Path) -> None:
    mesh = init_device_mesh(hora.device().type, (hora.world_size(),))
    parts = {
        "dealt": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]),
        "same": distribute_tensor(torch.arange(6.0), mesh, [Replicate()]),
    }
    with held() as go_on, Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"own": parts}, step=1, epoch=0, background=True)
        for part in parts.values():
            part.to_local().zero_()
        go_on()
    for found in checkpointer.load().state["own"].values():
        assert torch.equal(found, torch.arange(6.0))
