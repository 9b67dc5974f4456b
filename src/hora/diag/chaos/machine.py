"""A machine that is too small: memory that runs out, few file descriptors, little shared memory."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hora.diag.chaos import oracles, rights
from hora.diag.chaos.journal import named, recovery
from hora.diag.chaos.restarts import judge
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.trial import job

_GROUP_BYTES = 3_000_000_000
_LATER_S = 10.0


@contextmanager
def _small_group() -> Iterator[Path]:
    """A control group that may have so much memory; what is in it at the end must have ended."""
    group = rights.memory_group(f"hora-chaos-{os.getpid()}")
    group.mkdir()
    try:
        rights.memory_limit(group).write_text(str(_GROUP_BYTES))
        yield group
    finally:
        group.rmdir()


def _run_out_of_memory(ground: Ground, draw: Draw) -> Outcome:
    rank, update = draw.random.randrange(2), draw.random.randrange(6, 20)
    settings = ground.settings(hoard=(rank, update), held=(2,))
    with _small_group() as group, job(settings, "--max-restarts", "1") as trial:
        begins = named(trial.held_at(2), "begin")
        for process in trial.members():
            (group / "cgroup.procs").write_text(str(process.pid))
        victim = psutil.Process(next(int(event.fields["pid"]) for event in begins if event.rank == rank))
        trial.let_go(2)
        began_s = trial.wait_for("a rank that takes memory", lambda events: named(events, "hoarding"))[-1].at_s
        struck_s = began_s + trial.gone_after(began_s, [victim], _LATER_S)
        code = trial.wait()
        problems = judge(trial, settings, ground.golden(settings), code)
        problems += oracles.says(
            trial.text, rf"rank {rank} failed on \S+ .*", "out of memory: the kernel killed it", "restart 1 of at most 1"
        )
        heard_s = trial.heard_at(rf"hora: rank {rank} failed")
        trial.clear()
    return Outcome(({} if heard_s is None else {"detected_s": heard_s - struck_s}) | recovery(trial.events(), struck_s), problems)


def _few_descriptors(ground: Ground) -> Outcome:
    """Too few for two ranks: refused before anything is started."""
    with job(ground.settings(), within=("prlimit", "--nofile=64:64")) as trial:
        code = trial.wait()
        problems = [
            *oracles.ended_with(code, 2),
            *oracles.says(trial.text, r"2 ranks on one node need \d+ open files here, but the limit is 64; start fewer, or raise it"),
            *oracles.nobody_left(trial, time.monotonic()),
        ]
        problems += ["a rank was started"] if trial.events() else []
        heard_s = trial.heard_at("open files")
    return Outcome({} if heard_s is None else {"detected_s": heard_s - trial.began_s}, problems)


def _little_shared_memory(ground: Ground) -> Outcome:
    """Less than the ranks would take: they make do with it."""
    settings = ground.settings(step_s=0.0)
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    with job(settings, within=("unshare", "--mount", "sh", "-c", small, "sh")) as trial:
        code = trial.wait()
        return Outcome({}, judge(trial, settings, ground.golden(settings), code))


_LITTLE = {"64 file descriptors": _few_descriptors, "1 MB of shared memory": _little_shared_memory}


def _lacks(variant: str) -> str:
    return rights.to_mount() if _LITTLE[variant] is _little_shared_memory else rights.to_limit_descriptors()


SCENARIOS = (
    Scenario(
        "F5", "a rank that runs out of its control group's memory", _run_out_of_memory,
        wanted={"detected_s": 0.5, "recovered_s": 8.0, "lost_steps": 5}, lacks=lambda _: rights.to_limit_memory(),
    ),
    Scenario(
        "F20", "few file descriptors, little shared memory", lambda ground, draw: _LITTLE[draw.variant](ground), tuple(_LITTLE),
        {"detected_s": 5.0}, lacks=_lacks,
    ),
)  # fmt: skip
