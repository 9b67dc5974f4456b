"""A rank that takes longer than the others for a step of its own: it is named, and nothing else happens."""

import time

from hora.diag.chaos import oracles
from hora.diag.chaos.journal import named, starts_of
from hora.diag.chaos.restarts import judge
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.settings import SLOW_FACTOR
from hora.diag.chaos.trial import job
from hora.pulse import START_STEPS

_STEPS, _STEP_S = 42, 0.2


def _lag(ground: Ground, draw: Draw) -> Outcome:
    rank, begin = draw.random.randrange(2), START_STEPS + draw.random.randrange(3, 9)
    settings = ground.settings(steps=_STEPS, save_every=_STEPS, step_s=_STEP_S, slow=(rank, begin))
    with job(settings, "--max-restarts", "1") as trial:
        code = trial.wait()
        events = trial.events()
        problems = judge(trial, settings, ground.golden(settings), code)
        problems += oracles.says(trial.text, rf"rank {rank} is slow: [\d.]+ ms a step of its own, where the others take")
        problems += [] if len(starts_of(events)) == 1 else ["nothing may be started anew for a slow rank"]
        named_s = trial.heard_at("is slow")
        problems += oracles.nobody_left(trial, time.monotonic())
    if named_s is None:
        return Outcome({}, problems)
    steps = [event for event in named(events, "step") if event.rank == rank]
    began_s = next(event.at_s for event in steps if event.done == begin)
    made = sum(began_s < event.at_s <= named_s for event in steps)
    return Outcome({"detected_s": named_s - began_s, "named_steps": made}, problems)


SCENARIOS = (Scenario("F14", f"a rank that takes {SLOW_FACTOR} times as long as the others", _lag, wanted={"named_steps": 20}),)
