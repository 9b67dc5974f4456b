"""Saves that are killed at each of their system calls, and checkpoints that lose a bit or their end."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hora.diag.chaos import oracles, rights
from hora.diag.chaos.journal import named, starts_of
from hora.diag.chaos.restarts import judge, resumed_at
from hora.diag.chaos.save import whole_steps
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.settings import Settings
from hora.diag.chaos.trial import ChaosError, job
from hora.errors import CheckpointError
from hora.train.checkpoint.storage import Storage, verify

_CALLS = ("mkdir", "write", "fsync", "rename", "unlinkat", "rmdir")
_MOST_KILLS = 60
_KILLED = (-9, 137)
_FLIPS = 200


def _struck(*words: str) -> list[str]:
    return ["strace", "-f", "--seccomp-bpf", "-qq", "-o", os.devnull, *words]


def _kill_at_each_call(ground: Ground, draw: Draw) -> Outcome:
    """One save before, the struck one, and one that finds its way afterwards."""
    before = Path(ground.place())
    _save(before, 1)
    problems: list[str] = []
    kills = lost = 0
    for nth in range(1, _MOST_KILLS):
        directory = Path(ground.place()) / "checkpoints"
        shutil.copytree(before, directory)
        code = _save(directory, 2, *_struck("-e", f"inject={draw.variant}:signal=SIGKILL:when={nth}"))
        if code not in _KILLED:
            break
        kills += 1
        problems += _look(directory, f"{draw.variant} number {nth}")
        lost += whole_steps(directory) == []
        if _save(directory, 3) != 0 or os.listdir(directory) != ["step-00000003.g0"]:
            problems.append(f"the save after a kill at {draw.variant} number {nth} found {', '.join(os.listdir(directory))}")
    return Outcome({"found": (kills - lost) / kills} if kills else {}, problems if kills else ["the fault did not strike"])


def _save(directory: Path, step: int, *tracer: str) -> int:
    words = [*tracer, sys.executable, "-m", "hora.diag.chaos.save", str(directory), str(step)]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(words, env=environ, capture_output=True, timeout=60, check=False).returncode


def _look(directory: Path, where: str) -> Iterator[str]:
    try:
        if not set(whole_steps(directory)) & {1, 2}:
            yield f"killed at {where}, neither the old nor the new checkpoint is there"
    except (CheckpointError, ValueError, OSError) as error:
        yield f"killed at {where}: {error}"


def _damage(ground: Ground, draw: Draw) -> Outcome:
    """Damages the newest checkpoint in many ways, one at a time; with the last of them the run must go on from the one before."""
    halfway = ground.once("halfway", lambda: _run_halfway(ground))
    settings = replace(halfway, directory=ground.place())
    shutil.copytree(halfway.directory, settings.directory, dirs_exist_ok=True)
    storage = Storage(Path(settings.directory) / "checkpoints")
    newest = storage.names()[-1]
    files = sorted(path for path in (storage.path / str(newest)).iterdir())
    found = 0
    for number in range(_FLIPS):
        file = draw.random.choice(files)
        whole = file.read_bytes()
        file.write_bytes(_damaged(whole, draw))
        found += _is_seen(storage.path / str(newest))
        if number < _FLIPS - 1:
            file.write_bytes(whole)
    with job(settings) as trial:
        code = trial.wait()
        events = trial.events()
        lost = newest.step - resumed_at(events, starts_of(events)[-1])
        problems = judge(trial, settings, ground.golden(settings), code)
        problems += oracles.says(trial.text, rf"{newest} is damaged: .*{file.name}.*falling back to the one before")
    problems += [] if found == _FLIPS else [f"{_FLIPS - found} of {_FLIPS} damages were not seen"]
    return Outcome({"found": found / _FLIPS, "lost_steps": lost}, problems)


def _run_halfway(ground: Ground) -> Settings:
    """A run that ended by a failure some updates after its fourth checkpoint."""
    settings = ground.settings()
    with job(settings, fault="rank=0,point=step.22.before,act=exit=3") as trial:
        if trial.wait() != 3 or not named(trial.events(), "saved"):
            raise ChaosError(f"the run that was to be damaged did not come to its middle:\n{trial.text[-2000:]}")
    return settings


def _damaged(whole: bytes, draw: Draw) -> bytes:
    at = draw.random.randrange(len(whole))
    if draw.variant == "cut off":
        return whole[:at]
    content = bytearray(whole)
    content[at] ^= 1 << draw.random.randrange(8)
    return bytes(content)


def _is_seen(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except CheckpointError:
        return True
    return False


SCENARIOS = (
    Scenario(
        "F8", "kill -9 at each system call of a save", _kill_at_each_call, _CALLS, {"found": 1.0}, most=len(_CALLS),
        lacks=lambda _: rights.to_trace(),
    ),
    Scenario(
        "F10", "a flipped bit, or a lost end, in a checkpoint", _damage, ("flipped", "cut off"), {"found": 1.0, "lost_steps": 10}, quick=True
    ),
)  # fmt: skip
