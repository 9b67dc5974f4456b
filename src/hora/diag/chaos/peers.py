"""The same faults with torchrun and DistributedDataParallel, which `torch_workload` runs: a script that saves and resumes as a careful user does."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hora.diag.chaos.journal import named, recovery
from hora.diag.chaos.scenario import Draw, Ground, Outcome, if_ever
from hora.diag.chaos.settings import MANTISSA_BITS, Settings
from hora.diag.chaos.trial import Trial, heeding_ctrl_c, running

_WATCHED_S = 10.0


@contextmanager
def _torchrun(settings: Settings, *flags: str) -> Iterator[Trial]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *flags]
    with heeding_ctrl_c(), running([*words, "-m", "hora.diag.chaos.torch_workload", settings.to_json()], Path(settings.directory)) as trial:
        yield trial


def kill_a_rank(ground: Ground, draw: Draw) -> Outcome:
    """F1: a rank kills itself after an update."""
    settings = ground.settings(kill=(draw.seed % 2, draw.random.randrange(1, 29)))
    golden = _golden(ground)
    with _torchrun(settings, "--max-restarts", "1") as trial:
        code = trial.wait(120.0)
        events = trial.events()
        (struck,) = named(events, "killing")
        heard_s = trial.heard_at(r"failed \(exitcode: -9\)")
        numbers = ({} if heard_s is None else {"detected_s": heard_s - struck.at_s}) | recovery(events, struck.at_s)
        digests = {event.fields["digest"] for event in named(events, "end")}
        problems = [f"the exit code must be 0, but is {code}"] if code else []
        return Outcome(numbers, problems + (["the weights are others than those of an undisturbed run"] if digests != {golden} else []))


def flip_a_bit(ground: Ground, draw: Draw) -> Outcome:
    """F13: memory of one rank fails; of two ranks in all variants."""
    settings = ground.settings(flip=(draw.seed % 2, draw.random.randrange(6, 23), draw.random.randrange(MANTISSA_BITS)))
    golden = _golden(ground)
    with _torchrun(settings, "--max-restarts", "1") as trial:
        code = trial.wait(120.0)
        events = trial.events()
        digests = {event.fields["digest"] for event in named(events, "end")}
        problems = [] if named(events, "flipped") else ["the fault did not strike"]
        if digests != {golden}:
            problems.append(f"the run ends with exit code {code} and weights that are others than those of an undisturbed run")
        return Outcome({}, problems)


def kill_the_launcher(ground: Ground, _: Draw) -> Outcome:
    """F2: what the ranks do when their launcher is no more; they are given some seconds to notice."""
    settings = ground.settings(steps=2000)
    with _torchrun(settings) as trial:
        trial.wait_for("update 5", lambda events: any(event.done >= 5 for event in named(events, "step")))
        members = [process for process in trial.members() if process.pid != trial.process.pid]
        gone_s = trial.gone_after(trial.signal(signal.SIGKILL), members, _WATCHED_S)
        return Outcome(if_ever("gone_s", gone_s), _still_there(members, gone_s))


def interrupt(ground: Ground, _: Draw) -> Outcome:
    """F7: Ctrl-C, as a terminal sends it: to the launcher and the ranks."""
    settings = ground.settings(steps=2000)
    with _torchrun(settings) as trial:
        trial.wait_for("update 5", lambda events: any(event.done >= 5 for event in named(events, "step")))
        members = trial.members()
        began_s = time.monotonic()
        for process in members:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGINT)
        trial.wait(60.0)
        gone_s = trial.gone_after(began_s, members, _WATCHED_S)
        return Outcome(if_ever("gone_s", gone_s), _still_there(members, gone_s))


def _still_there(members: list[psutil.Process], gone_s: float) -> list[str]:
    return [] if gone_s < _WATCHED_S else [f"{len(members)} processes go on after {_WATCHED_S:g} s"]


def _golden(ground: Ground) -> str:
    with _torchrun(ground.settings(step_s=0.0)) as trial:
        trial.wait(120.0)
        return str(named(trial.events(), "end")[0].fields["digest"])
