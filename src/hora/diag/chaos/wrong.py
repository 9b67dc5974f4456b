"""One rank that calls something else than the others, and one whose loss is no number."""

import re
import time

from hora.diag.chaos import oracles
from hora.diag.chaos.journal import Event, named
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.settings import MISTAKES
from hora.diag.chaos.trial import job


def _call_differently(ground: Ground, draw: Draw) -> Outcome:
    settings = ground.settings(mistake=draw.variant)
    with job(settings) as trial:
        code = trial.wait()
        events = trial.events()
        problems = [] if code not in (0, 65) else [f"the job must fail, but ends with exit code {code}"]
        problems += oracles.nobody_left(trial, time.monotonic())
    # A rank that calls less often is through, and leaves; the other is told so.
    through = {0} if draw.variant == "count" else set()
    if got_through := {event.rank for event in named(events, "passed")} - through:
        problems.append(f"ranks {sorted(got_through)} got a result")
    refused = named(events, "refused")
    for rank in {0, 1} - through:
        said = next((event.fields["said"] for event in refused if event.rank == rank), "")
        if not re.search(r"(CollectiveMismatch|PeerLost).*rank [01]", said, re.DOTALL):
            problems.append(f"rank {rank} was told {said!r}")
    return Outcome(_noticed(events, "calling", "refused"), problems)


def _noticed(events: list[Event], begin: str, end: str) -> dict[str, float]:
    """Seconds from when the last rank came to the fault until the last rank was told."""
    began, ended = named(events, begin), named(events, end)
    return {"detected_s": ended[-1].at_s - began[-1].at_s} if began and ended else {}


def _poison(ground: Ground, draw: Draw) -> Outcome:
    """A NaN on one rank: an error on all, or an update that all leave out."""
    rank, at = draw.random.randrange(2), draw.random.randrange(2, 28)
    settings = ground.settings(poison=(rank, at), non_finite=draw.variant)
    with job(settings) as trial:
        code = trial.wait()
        events = trial.events()
        problems = [*oracles.nobody_left(trial, time.monotonic())]
    if draw.variant == "skip":
        ends = named(events, "end")
        problems += oracles.ended_with(code, 0)
        problems += (
            [] if len({event.fields["digest"] for event in ends}) == 1 and len(ends) == 2 else ["the ranks must end with the same weights"]
        )
        problems += [] if {event.fields["skipped"] for event in ends} == {1} else ["all ranks must leave out one update"]
        return Outcome({}, problems)
    refused = named(events, "refused")
    problems += [] if code == 1 else [f"the exit code must be 1, but is {code}"]
    problems += [] if {event.rank for event in refused} == {0, 1} else ["all ranks must be told"]
    for event in refused:
        problems += oracles.says(event.fields["said"], "NonFiniteGradient", rf"on rank {rank}", r"'0\.weight'")
    lost = {max((event.done for event in named(events, "step") if event.rank == each), default=0) - at for each in (0, 1)}
    problems += [] if lost == {0} else [f"the ranks must stop after {at} updates, but differ by {sorted(lost)}"]
    before = [event.at_s for event in named(events, "step") if event.done == at]
    return Outcome({"detected_s": refused[-1].at_s - before[-1]} if refused and before else {}, problems)


SCENARIOS = (
    Scenario(
        "F11",
        "another type, shape, operation, order or number of calls on one rank",
        _call_differently,
        MISTAKES,
        {"detected_s": 0.5},
    ),
    Scenario("F12", "a NaN on one rank", _poison, ("raise", "skip"), {"detected_s": 0.5}, quick=True),
)
