"""Ranks and launchers that are killed, and jobs that go on with other numbers of ranks."""

import signal
from collections.abc import Callable
from dataclasses import replace

from hora.diag.chaos import oracles, peers
from hora.diag.chaos.journal import Event, named, recovery, starts_of
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario, if_ever
from hora.diag.chaos.settings import Settings
from hora.diag.chaos.trial import Trial, job

_POINTS = ("step.N.before", "step.N.after", "collective.N", "init.met", "init.joined")
_POINTS_OF_RANK_0 = ("checkpoint.opened", "checkpoint.written", "checkpoint.fsynced", "checkpoint.committed")
# In an order in which a few trials see something of everything.
_KILLS = (
    *(f"rank {rank} at {point}" for rank, point in zip((1, 0, 1, 0, 1), _POINTS, strict=True)),
    *(f"rank 0 at {point}" for point in _POINTS_OF_RANK_0),
    *(f"rank {rank} at {point}" for rank, point in zip((0, 1, 0, 1, 0), _POINTS, strict=True)),
)
_RESIZED = (4, 2, 1, 4)


def _kill_a_rank(ground: Ground, draw: Draw) -> Outcome:
    return _strike_a_rank(
        ground,
        draw,
        "SIGKILL",
        lambda rank: (rf"hora: rank {rank} failed", rf"rank {rank} failed on \S+ \(process \d+\): killed by SIGKILL"),
    )


def _stop_a_rank(ground: Ground, draw: Draw) -> Outcome:
    return _strike_a_rank(ground, draw, "SIGSTOP", lambda rank: (rf"hora: rank {rank} is stopped", rf"rank {rank} on \S+ \(process \d+\)"))


def _strike_a_rank(ground: Ground, draw: Draw, act: str, said: Callable[[str], tuple[str, str]]) -> Outcome:
    """A signal to a rank at a named point; `said` gives what notices it and what names it."""
    settings = ground.settings()
    rank, point = draw.variant.removeprefix("rank ").split(" at ")
    point = point.replace("N", str(draw.random.randrange(1, settings.steps - 1)))
    noticed, named_as = said(rank)
    with job(settings, "--max-restarts", "1", fault=f"rank={rank},point={point},act={act},generation=0") as trial:
        code = trial.wait()
        numbers, problems = _after_fault(trial, trial.heard_at("injected fault"), noticed)
        problems += judge(trial, settings, ground.golden(settings), code)
        problems += oracles.says(trial.text, named_as, "restart 1 of at most 1")
    return Outcome(numbers, problems)


def _after_fault(trial: Trial, struck_s: float | None, noticed: str) -> tuple[dict[str, float], list[str]]:
    """How long it took to notice a fault and to train again, and what was lost."""
    if struck_s is None:
        return {}, ["the fault did not strike"]
    heard_s = trial.heard_at(noticed)
    return ({} if heard_s is None else {"detected_s": heard_s - struck_s}) | recovery(trial.events(), struck_s), []


def resumed_at(events: list[Event], start: str) -> int:
    """After how many updates a start went on."""
    return next((event.done for event in named(events, "resumed", start)), 0)


def judge(trial: Trial, settings: Settings, golden: str, code: int) -> list[str]:
    """What holds of every run that comes to its end."""
    ended_s = max((at_s for at_s, _ in trial.said), default=0.0)
    events = trial.events()
    return [
        *oracles.ended_with(code, 0),
        *oracles.same_bits(events, golden),
        *oracles.each_sample_once(events, settings.steps, settings.samples),
        *oracles.one_writer(events),
        *oracles.nobody_left(trial, ended_s),
    ]


def _kill_the_launcher(ground: Ground, draw: Draw) -> Outcome:
    settings = ground.settings()
    at = draw.random.randrange(1, settings.steps - 5)
    with job(settings) as trial:
        trial.wait_for(f"update {at}", lambda events: any(event.done >= at for event in named(events, "step")))
        members = [process for process in trial.members() if process.pid != trial.process.pid]
        gone_s = trial.gone_after(trial.signal(signal.SIGKILL), members)
        problems = [] if gone_s < oracles.GONE_S else [f"processes of the job are there {gone_s:.1f} s after their launcher was killed"]
        problems += [f"left behind: {name}" for name in trial.leftovers()]
    numbers, further = go_on(ground, settings)
    return Outcome({**if_ever("gone_s", gone_s), **numbers}, problems + further)


def go_on(ground: Ground, settings: Settings, ranks: int = 2) -> tuple[dict[str, float], list[str]]:
    """Starts the job once more, as its user would, and judges the whole run."""
    with job(settings, ranks=ranks) as trial:
        code = trial.wait()
        events = trial.events()
        starts = starts_of(events)
        before = max((event.done for start in starts[:-1] for event in named(events, "step", start)), default=0)
        return {"lost_steps": before - resumed_at(events, starts[-1])}, judge(trial, settings, ground.golden(settings), code)


def _resize(ground: Ground, draw: Draw) -> Outcome:
    """Stops the job again and again with SIGTERM, and goes on with another number of ranks."""
    settings = ground.settings(save_every=1000)
    problems: list[str] = []
    lost = 0
    for ranks, share in zip(_RESIZED[:-1], (1, 2, 3), strict=True):
        at = share * settings.steps // 4 + draw.random.randrange(-2, 3)
        with job(settings, ranks=ranks) as trial:
            trial.wait_for(f"update {at}", lambda events, at=at: any(event.done >= at for event in named(events, "step")))  # type: ignore[misc]
            trial.signal(signal.SIGTERM)
            problems += oracles.ended_with(trial.wait(), 75)
            lost += sum(event.done for event in named(trial.events(), "stopped")[-1:]) == 0
    numbers, further = go_on(ground, replace(settings), _RESIZED[-1])
    return Outcome({"lost_steps": numbers["lost_steps"] + lost}, problems + further)


SCENARIOS = (
    Scenario(
        "F1", "kill -9 of each rank at each named point", _kill_a_rank, _KILLS,
        {"detected_s": 0.5, "recovered_s": 8.0, "lost_steps": 5}, peer=peers.kill_a_rank, quick=True,
    ),
    Scenario("F2", "kill -9 of the launcher", _kill_the_launcher, wanted={"gone_s": 1.0, "lost_steps": 5}, peer=peers.kill_the_launcher),
    Scenario(
        "F3", "SIGSTOP of a rank at a named point", _stop_a_rank, _KILLS, {"detected_s": 4.0, "recovered_s": 12.0, "lost_steps": 5}
    ),
    Scenario("F17", "4, 2, 1 and 4 ranks, one after the other", _resize, wanted={"lost_steps": 0}, most=5),
)  # fmt: skip
