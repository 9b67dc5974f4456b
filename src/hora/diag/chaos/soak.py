"""A long run whose ranks are killed at random, about once a minute: how much of the time is spent on updates that count."""

import random
import signal
import statistics
import time
from itertools import pairwise

from hora.diag.chaos import oracles
from hora.diag.chaos.journal import Event, named, starts_of
from hora.diag.chaos.restarts import go_on
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.settings import Settings
from hora.diag.chaos.trial import Trial, job

NAME = "F24"
MEAN_S = 60.0
"""Mean time between failures."""

_STEP_S, _SAVE_S = 0.1, 5.0
_LOOK_S, _RANKS = 0.5, 2


def scenario(minutes: float) -> Scenario:
    """The soak of so many minutes."""

    def soak(ground: Ground, draw: Draw) -> Outcome:
        steps = round(minutes * 60 / _STEP_S)  # as many as would be made if nothing happened
        settings = ground.settings(steps=steps, step_s=_STEP_S, save_every=round(_SAVE_S / _STEP_S))
        return _soak(ground, settings, minutes * 60, draw.random)

    return Scenario(NAME, f"{minutes:g} minutes with a kill -9 of a rank once a minute or so", soak, wanted={"goodput": 0.8}, most=1)


def _soak(ground: Ground, settings: Settings, seconds: float, dice: random.Random) -> Outcome:
    with job(settings, "--max-restarts", "1000") as trial:
        kills = _kill_now_and_then(trial, seconds, dice)
        trial.wait_for("the last start's first update", lambda events: named(events, "step", events[-1].start))
        trial.signal(signal.SIGTERM)
        code = trial.wait()
        events = trial.events()
        problems = [*oracles.nobody_left(trial, time.monotonic()), *_matches(trial.text, kills)]
        problems += [] if code in (0, 75) else [f"the exit code must be 75 or 0, but is {code}"]
    made = max(event.done for event in named(events, "step"))
    goodput = made * _time_of_a_step(events) / (events[-1].at_s - trial.began_s)
    # The rest of the run at full speed, so that its bits can be compared.
    _, further = go_on(ground, Settings(settings.directory, steps=settings.steps, save_every=settings.save_every, step_s=0.0))
    numbers = {"goodput": goodput, "kills": float(kills), "lost_steps": float(_lost(events)), **_recovery(events)}
    return Outcome(numbers, problems + further)


def _kill_now_and_then(trial: Trial, seconds: float, dice: random.Random) -> int:
    """Kills a rank at times of a Poisson process, one in each start of the job; how many it has killed.

    One that falls into the time between two starts waits until the ranks of the next are there.
    """
    struck: set[str] = set()
    next_s, end_s = time.monotonic() + dice.expovariate(1 / MEAN_S), time.monotonic() + seconds
    while time.monotonic() < end_s and trial.process.poll() is None:
        if time.monotonic() >= next_s:
            begins = named(trial.events(), "begin")
            alive = [event for event in begins if event.start == begins[-1].start]
            start, pid = alive[0].start, int(dice.choice(alive).fields["pid"])
            if len(alive) == _RANKS and start not in struck and trial.strike(pid, signal.SIGKILL):
                struck.add(start)
                next_s = time.monotonic() + dice.expovariate(1 / MEAN_S)
        time.sleep(_LOOK_S)
    return len(struck)


def _matches(text: str, kills: int) -> list[str]:
    restarts = text.count("all ranks are started anew")
    return [] if restarts == kills else [f"{kills} kills must be followed by as many restarts, but there are {restarts}"]


def _time_of_a_step(events: list[Event]) -> float:
    """The median, as nothing happens in most of them."""
    mine = [event for event in named(events, "step") if event.rank == 0]
    return statistics.median(later.at_s - earlier.at_s for earlier, later in pairwise(mine) if earlier.start == later.start)


def _lost(events: list[Event]) -> int:
    """Updates that were made more than once."""
    made = [event.done for event in named(events, "step") if event.rank == 0]
    return len(made) - len(set(made))


def _recovery(events: list[Event]) -> dict[str, float]:
    """The median time from the last update of a start to the first of the next."""
    steps = {start: [event.at_s for event in named(events, "step", start)] for start in starts_of(events)}
    made = [times for times in steps.values() if times]
    gaps = [later[0] - earlier[-1] for earlier, later in pairwise(made)]
    return {"recovered_s": statistics.median(gaps)} if gaps else {}
