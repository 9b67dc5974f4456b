"""A bit of one parameter flips on one rank, as when memory fails: nothing computes a NaN, and the ranks' models drift apart without a word."""

import time

from hora.diag.chaos import oracles, peers
from hora.diag.chaos.journal import named, recovery, starts_of
from hora.diag.chaos.restarts import judge
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.settings import MANTISSA_BITS, Settings
from hora.diag.chaos.trial import Trial, job

_EVERY = 4


def _flip(ground: Ground, draw: Draw) -> Outcome:
    """Two ranks go on from their checkpoint; of three the one that is alone gets what the other two have."""
    ranks = 2 if draw.variant == "of two ranks" else 3
    rank, update = draw.random.randrange(ranks), draw.random.randrange(6, 23)
    flip = (rank, update, draw.random.randrange(MANTISSA_BITS))
    settings = ground.settings(flip=flip, check_every=_EVERY, repair=ranks == 3)
    with job(settings, "--max-restarts", "1", ranks=ranks) as trial:
        code = trial.wait()
        restored = _judge_restored if ranks == 2 else _judge_repaired
        return restored(trial, settings, ground.golden(settings), code)


def _judge_restored(trial: Trial, settings: Settings, golden: str, code: int) -> Outcome:
    events = trial.events()
    problems = judge(trial, settings, golden, code)
    flipped, refused = named(events, "flipped"), named(events, "refused")
    if not flipped or {event.rank for event in refused} != {0, 1}:
        return Outcome({}, [*problems, "both ranks must be told of the bit that has flipped"])
    for event in refused:
        problems += oracles.says(event.fields["said"], "ReplicaMismatch", r"0\.weight'")
    problems += oracles.says(trial.text, "restart 1 of at most 1")
    return Outcome(_found(trial, refused[-1].at_s) | recovery(events, flipped[0].at_s), problems + _in_time(trial, settings))


def _judge_repaired(trial: Trial, settings: Settings, _: str, code: int) -> Outcome:
    """What the flipped bit has done to the gradients until it was found stays; but the ranks are alike again."""
    events = trial.events()
    digests = [event.fields["digest"] for event in named(events, "end")]
    problems = [*oracles.ended_with(code, 0), *oracles.nobody_left(trial, time.monotonic())]
    problems += oracles.each_sample_once(events, settings.steps)
    problems += [] if len(digests) == 3 and len(set(digests)) == 1 else ["the three ranks must end with the same weights"]
    problems += [] if len(starts_of(events)) == 1 else ["nothing needs to be started anew where there is a majority"]
    problems += oracles.says(trial.text, rf"rank {settings.flip[0] if settings.flip else 0}\b.*0\.weight'")
    heard_s = trial.heard_at(r"0\.weight'")
    return Outcome({} if heard_s is None else _found(trial, heard_s), problems + _in_time(trial, settings))


def _found(trial: Trial, at_s: float) -> dict[str, float]:
    """How long after the flip, in seconds and in updates."""
    flipped = named(trial.events(), "flipped")[0]
    steps = {event.done for event in named(trial.events(), "step", flipped.start) if flipped.at_s < event.at_s <= at_s}
    return {"detected_s": at_s - flipped.at_s, "named_steps": len(steps)}


def _in_time(trial: Trial, settings: Settings) -> list[str]:
    flipped = named(trial.events(), "flipped")[0]
    made = max(event.done for event in named(trial.events(), "step", flipped.start))
    repaired = settings.repair or made - flipped.done <= _EVERY
    return (
        [] if repaired else [f"the bit that flipped after update {flipped.done} must be found {_EVERY} updates later, but {made} were made"]
    )


SCENARIOS = (
    Scenario(
        "F13", "a bit of one parameter flips on one rank", _flip, ("of two ranks", "of three ranks"),
        {"named_steps": _EVERY, "lost_steps": 5 + _EVERY}, peer=peers.flip_a_bit,
    ),
)  # fmt: skip
