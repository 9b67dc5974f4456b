"""Jobs that are asked to end, and a second job that wants the directory of the first."""

import signal
import time
from dataclasses import replace
from functools import partial

from hora.diag.chaos import oracles, peers
from hora.diag.chaos.journal import Event, named
from hora.diag.chaos.restarts import go_on
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario, if_ever
from hora.diag.chaos.trial import Trial, job


def _reached(at: int, events: list[Event]) -> bool:
    return any(event.done >= at for event in named(events, "step"))


def _terminate(ground: Ground, draw: Draw) -> Outcome:
    settings = ground.settings()
    at = draw.random.randrange(1, settings.steps - 8)
    with job(settings) as trial:
        trial.wait_for(f"update {at}", partial(_reached, at))
        asked_s = trial.signal(signal.SIGTERM)
        code = trial.wait()
        events = trial.events()
        seen = max((event.done for event in named(events, "step") if event.at_s <= asked_s), default=0)
        stopped = [event.done for event in named(events, "stopped")]
        problems = [
            *oracles.ended_with(code, 75),
            *oracles.nobody_left(trial, time.monotonic()),
            *oracles.says(trial.text, "SIGTERM after a save"),
        ]
        # The update under way, and one for the word to go round.
        if not stopped or max(stopped) > seen + 2:
            problems.append(f"asked to stop after update {seen}, it was saved after {max(stopped, default=None)}")
    numbers, further = go_on(ground, settings)
    return Outcome({"gone_s": trial_end_s(trial) - asked_s, **numbers}, problems + further)


def trial_end_s(trial: Trial) -> float:
    """When a trial has said its last word."""
    return max((at_s for at_s, _ in trial.said), default=trial.began_s)


def _interrupt(ground: Ground, draw: Draw) -> Outcome:
    """Once; or, where the ranks do not listen, twice."""
    twice = draw.variant == "twice"
    settings = ground.settings(stubborn=twice)
    at = draw.random.randrange(1, settings.steps - 8)
    with job(settings) as trial:
        trial.wait_for(f"update {at}", partial(_reached, at))
        members = trial.members()
        asked_s = trial.signal(signal.SIGINT)
        if twice:
            trial.wait_for("both ranks having been asked", lambda events: len(named(events, "asked")) >= 2)
            asked_s = trial.signal(signal.SIGINT)
        code = trial.wait()
        gone_s = trial.gone_after(asked_s, members)
        problems = [
            *oracles.ended_with(code, 130),
            *oracles.nobody_left(trial, time.monotonic()),
            *oracles.says(trial.text, "ended by Ctrl-C"),
        ]
    numbers, further = go_on(ground, replace(settings, stubborn=False))
    return Outcome({**if_ever("gone_s", gone_s), **numbers}, problems + further)


def _second_job(ground: Ground, _: Draw) -> Outcome:
    settings = ground.settings(held=(2,))
    with job(settings) as first:
        first.wait_for("update 2", partial(_reached, 2))
        with job(settings) as second:
            code = second.wait()
            refused = named(second.events(), "refused")
            met = named(second.events(), "begin")
        problems = [
            *oracles.ended_with(code, 2),
            *oracles.says(second.text, r"only one job may work in \S+, but process \d+ on \S+ does already"),
        ]
        problems += [] if first.process.poll() is None else ["the first job had ended before the second was refused"]
        first.let_go(2)
        problems += oracles.ended_with(first.wait(), 0)
        problems += oracles.nobody_left(first, time.monotonic())
        events = [event for event in first.events() if event.start == met[0].start]
        problems += [*oracles.same_bits(events, ground.golden(settings)), *oracles.each_sample_once(events, settings.steps)]
    return Outcome({"detected_s": refused[0].at_s - met[-1].at_s} if refused else {}, problems)


SCENARIOS = (
    Scenario("F6", "SIGTERM to the launcher", _terminate, wanted={"lost_steps": 0}),
    Scenario("F7", "Ctrl-C, once or twice", _interrupt, ("once", "twice"), {"gone_s": 2.0, "lost_steps": 5}, peer=peers.interrupt),
    Scenario("F18", "two jobs in one directory", _second_job, wanted={}, most=5),
)
