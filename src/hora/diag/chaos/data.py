"""Data that does not come, or hardly is any: loaders' workers that are killed or stopped, and data sets of odd sizes."""

import signal
import time

import psutil

from hora.diag.chaos import oracles
from hora.diag.chaos.journal import named, recovery
from hora.diag.chaos.restarts import judge
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.settings import LOADER_TIMEOUT_S
from hora.diag.chaos.trial import ChaosError, job

_HELD = 8


def _strike_a_worker(ground: Ground, draw: Draw) -> Outcome:
    settings = ground.settings(num_workers=1, held=(_HELD,))
    rank = draw.random.randrange(2)
    killed = draw.variant == "killed"
    with job(settings, "--max-restarts", "1") as trial:
        begins = named(trial.held_at(_HELD), "begin")
        pid = next(int(event.fields["pid"]) for event in begins if event.rank == rank)
        workers = [process.pid for process in psutil.Process(pid).children()]
        if len(workers) != 1 or not trial.strike(workers[0], signal.SIGKILL if killed else signal.SIGSTOP):
            raise ChaosError(f"rank {rank} must have one worker of its loader, but has {len(workers)}")
        struck_s = trial.let_go(_HELD)
        code = trial.wait()
        problems = judge(trial, settings, ground.golden(settings), code)
        why = r"worker process \d+ ended with SIGKILL" if killed else rf"within timeout={LOADER_TIMEOUT_S:g} s: a worker is stuck"
        problems += oracles.says(trial.text, rf"the micro-batch of rank {rank} of 2 in .* did not come.*{why}", "restart 1 of at most 1")
        heard_s = trial.heard_at(rf"hora: rank {rank} failed")
    return Outcome(({} if heard_s is None else {"detected_s": heard_s - struck_s}) | recovery(trial.events(), struck_s), problems)


def _train_on(ground: Ground, draw: Draw) -> Outcome:
    samples = _SIZES[draw.variant]
    settings = ground.settings(samples=samples, step_s=0.0)
    with job(settings) as trial:
        code = trial.wait()
        if samples:
            # One process is the measure: it makes the same updates of the same samples.
            return Outcome({}, judge(trial, settings, ground.golden(settings, ranks=1), code))
        refused = named(trial.events(), "refused")
        problems = [*oracles.nobody_left(trial, time.monotonic())]
    problems += [] if code != 0 and not named(trial.events(), "step") else ["an empty data set must be refused before the first update"]
    problems += [] if {event.rank for event in refused} == {0, 1} else ["both ranks must be told"]
    for event in refused:
        problems += oracles.says(event.fields["said"], "ConfigError: the data set must hold at least one sample, but is empty")
    return Outcome({}, problems)


_SIZES = {"none": 0, "fewer samples than ranks": 1, "a last batch that is no multiple of the ranks": 97}

SCENARIOS = (
    Scenario("F15", "a data set that is empty, tiny, or not to be dealt out evenly", _train_on, tuple(_SIZES)),
    Scenario(
        "F16", "a loader's worker that is killed or stopped", _strike_a_worker, ("killed", "stopped"),
        {"detected_s": LOADER_TIMEOUT_S + 1.0, "recovered_s": 12.0, "lost_steps": 5},
    ),
)  # fmt: skip
