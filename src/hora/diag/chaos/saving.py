"""Saves that the disk refuses, while training goes on: no rank stops, what was saved before stays whole, and the next save works again."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil

from hora.diag.chaos import oracles, rights
from hora.diag.chaos.journal import Event, named
from hora.diag.chaos.restarts import judge
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.trial import ChaosError, Trial, job
from hora.errors import CheckpointError
from hora.train.checkpoint.storage import Storage, verify

_BROKEN, _REFUSED, _MENDED, _SAVED = 7, 10, 12, 15
"""The updates after which the disk breaks, a save is refused, the disk is mended, and a save must work again."""

_BALLAST_BYTES, _SHORT_BYTES, _DISK = 1_000_000, 500_000, "4m"
_ATTACHED_S = 20.0


def _refuse(ground: Ground, draw: Draw) -> Outcome:
    settings = ground.settings(held=(_BROKEN, _MENDED), ballast_bytes=_BALLAST_BYTES, tolerant=True)
    checkpoints = Path(settings.directory) / "checkpoints"
    within = _own_disk(checkpoints) if draw.variant in _ON_A_DISK else []
    with job(settings, within=within) as trial:
        # A disk that is mounted for the job alone is seen through its launcher.
        seen = Path(f"/proc/{trial.process.pid}/root{checkpoints}") if within else checkpoints
        begun = trial.held_at(_BROKEN)
        with _FAULTS[draw.variant](trial, seen, _rank_zero(begun)):
            trial.let_go(_BROKEN)
            events = trial.held_at(_MENDED)
            problems = [*_told(events, draw.variant), *_kept(seen)]
        trial.let_go(_MENDED)
        code = trial.wait()
        problems += judge(trial, settings, ground.golden(settings), code)
        saved = {(event.rank, event.done) for event in named(trial.events(), "saved")}
    if not saved >= {(rank, done) for rank in (0, 1) for done in (_SAVED, settings.steps)}:
        problems.append(f"once the disk was mended the saves must work, but those that did are {sorted(saved)}")
    return Outcome({"lost_steps": 0.0 if len(named(trial.events(), "resumed")) == 2 else 1.0}, problems)


def _own_disk(directory: Path) -> list[str]:
    directory.mkdir()
    mounted = f'mount -t tmpfs -o size={_DISK} tmpfs "$0" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mounted, str(directory)]


def _rank_zero(events: list[Event]) -> psutil.Process:
    return psutil.Process(next(int(event.fields["pid"]) for event in named(events, "begin") if event.rank == 0))


def _told(events: list[Event], variant: str) -> Iterator[str]:
    """All ranks have been told of the one save that was refused, and why."""
    refused = {(event.rank, event.done): event.fields["said"] for event in named(events, "unsaved")}
    if set(refused) != {(0, _REFUSED), (1, _REFUSED)}:
        yield f"the save after update {_REFUSED}, and no other, must be refused on both ranks, but refused were {sorted(refused)}"
    for said in refused.values():
        yield from oracles.says(said, _WORDS[variant])


def _kept(checkpoints: Path) -> Iterator[str]:
    """What was saved before is there and whole, and nothing of what was not."""
    storage = Storage(checkpoints)
    if [name.step for name in storage.names()] != [5]:
        yield f"the checkpoint of update 5 alone must be there, but there are {', '.join(map(str, storage.names()))}"
    for name in storage.names():
        try:
            verify(checkpoints / str(name))
        except CheckpointError as error:
            yield str(error)
    if left := [entry for entry in os.listdir(checkpoints) if entry.startswith(".")]:
        yield f"left behind: {', '.join(left)}"


# How a disk is broken inside a `with` block -----------------------------------------------------------------------------------------------


@contextmanager
def _full(trial: Trial, checkpoints: Path, _: psutil.Process) -> Iterator[None]:
    del trial
    filler = checkpoints / "filler"
    room = os.statvfs(checkpoints)
    filler.write_bytes(bytes(room.f_bavail * room.f_frsize - _BALLAST_BYTES // 2))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def _read_only(trial: Trial, checkpoints: Path, _: psutil.Process) -> Iterator[None]:
    del checkpoints
    inside = ["nsenter", "--mount", "--target", str(trial.process.pid), "mount", "-o"]
    place = str(trial.place / "checkpoints")
    subprocess.run([*inside, "remount,ro", place], check=True, capture_output=True, timeout=20)
    try:
        yield
    finally:
        subprocess.run([*inside, "remount,rw", place], check=True, capture_output=True, timeout=20)


@contextmanager
def _short(trial: Trial, checkpoints: Path, rank: psutil.Process) -> Iterator[None]:
    """Writes end where a file has reached its limit: the last one writes less than it was asked to."""
    del trial, checkpoints
    before = rank.rlimit(psutil.RLIMIT_FSIZE)
    rank.rlimit(psutil.RLIMIT_FSIZE, (_SHORT_BYTES, before[1]))
    try:
        yield
    finally:
        rank.rlimit(psutil.RLIMIT_FSIZE, before)


@contextmanager
def _failing(trial: Trial, checkpoints: Path, rank: psutil.Process) -> Iterator[None]:
    """What is written does not reach the disk: `fsync` fails."""
    del trial, checkpoints
    words = ["strace", "-f", "-o", os.devnull, "-e", "inject=fsync:error=EIO", "-p", str(rank.pid)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            _wait_until_attached(tracer)
            yield
        finally:
            tracer.terminate()
            tracer.wait(_ATTACHED_S)


def _wait_until_attached(tracer: subprocess.Popen[str]) -> None:
    assert tracer.stderr is not None
    end_s = time.monotonic() + _ATTACHED_S
    while "attached" not in (line := tracer.stderr.readline()):
        if not line or time.monotonic() > end_s:
            raise ChaosError(f"strace does not attach: {line}")


_Breaking = Callable[[Trial, Path, psutil.Process], AbstractContextManager[None]]
_FAULTS: dict[str, _Breaking] = {"full disk": _full, "failing disk": _failing, "read-only disk": _read_only, "short write": _short}
_WORDS = {
    "full disk": "No space left on device",
    "failing disk": "Input/output error",
    "read-only disk": "Read-only file system",
    "short write": "File too large",
}
_ON_A_DISK = ("full disk", "read-only disk")


def _lacks(variant: str) -> str:
    if variant in _ON_A_DISK:
        return rights.to_mount()
    if variant == "failing disk":
        return rights.to_trace()
    return "" if sys.platform == "linux" else "limits of another process can be set on Linux only"


SCENARIOS = (
    Scenario(
        "F9", "a save that the disk refuses: full, failing, read-only, or short", _refuse, tuple(_FAULTS), {"lost_steps": 0}, lacks=_lacks
    ),
)  # fmt: skip
