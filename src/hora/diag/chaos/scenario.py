"""What a scenario is: a fault, what is promised of it, and how one trial of it is made and judged."""

import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from hora.diag.chaos import rights
from hora.diag.chaos.journal import named
from hora.diag.chaos.settings import Settings
from hora.diag.chaos.trial import ChaosError, job


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        numbers: measured, by the name of the measure (`MEASURES`).
        problems: what an oracle found wrong; none: passed.
    """

    numbers: Mapping[str, float]
    problems: list[str]


def if_ever(measure: str, value: float) -> dict[str, float]:
    """A number that was measured; nothing if what was waited for has not come."""
    return {measure: value} if math.isfinite(value) else {}


@dataclass(frozen=True)
class Draw:
    """Which trial of a scenario is made: all that is random about it follows from this."""

    variant: str
    seed: int
    random: random.Random


class Ground:
    """Where trials are made: a directory for each, what the workload comes to when nothing happens to it, and runs that several trials begin with."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._made: dict[str, Settings] = {}
        self._golden: dict[tuple[Settings, int], str] = {}

    def place(self) -> str:
        """A new directory."""
        return tempfile.mkdtemp(dir=self._base)

    def settings(self, **others: object) -> Settings:
        """Those of a new run in a place of its own."""
        return replace(Settings(self.place()), **others)  # type: ignore[arg-type]

    def once(self, name: str, make: Callable[[], Settings]) -> Settings:
        """The run `name`, made when it is first asked for."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def golden(self, settings: Settings, ranks: int = 2) -> str:
        """The digest that a run with such settings ends with when nothing happens to it.

        Raises:
            ChaosError: it does not end well even then.
        """
        plain = Settings("", steps=settings.steps, save_every=settings.steps, step_s=0.0, samples=settings.samples)
        if (plain, ranks) not in self._golden:
            with job(replace(plain, directory=self.place()), ranks=ranks) as trial:
                if (code := trial.wait(600.0)) != 0:
                    raise ChaosError(f"the undisturbed run ended with exit code {code}:\n{trial.text[-2000:]}")
                self._golden[plain, ranks] = str(named(trial.events(), "end")[0].fields["digest"])
        return self._golden[plain, ranks]


@contextmanager
def on_ground(directory: Path | None) -> Iterator[Ground]:
    """A ground in `directory`, which is kept, or in one of its own, which is not."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield Ground(directory)
        return
    base = Path(tempfile.mkdtemp(prefix="hora-chaos-"))
    try:
        yield Ground(base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


Run = Callable[[Ground, Draw], Outcome]


@dataclass(frozen=True)
class Scenario:
    """A fault and what is promised.

    Attributes:
        name: by which it is asked for.
        fault: what happens to the job.
        run: makes one trial.
        variants: taken in turns.
        wanted: the most that a measure should come to, on a machine of two cores.
        peer: makes one trial of the same with torchrun, where that is to be compared.
        most: trials that are enough, where one takes long.
        quick: whether it belongs to the tests that are run all the time.
        lacks: what this machine lacks for a variant, and what to do about it; empty: nothing. Such a trial is skipped.
    """

    name: str
    fault: str
    run: Run
    variants: tuple[str, ...] = ("",)
    wanted: Mapping[str, float] = field(default_factory=dict)
    peer: Run | None = None
    most: int = 1000
    quick: bool = False
    lacks: Callable[[str], str] = rights.nothing

    def draw(self, seed: int) -> Draw:
        """The trial number `seed`."""
        variant = self.variants[seed % len(self.variants)]
        return Draw(variant, seed, random.Random(f"{self.name}/{variant}/{seed}"))


MEASURES = {
    # name: how it is called in tables
    "detected_s": "noticed after",
    "recovered_s": "training again after",
    "lost_steps": "updates lost",
    "named_steps": "updates until named",
    "gone_s": "all gone after",
    "found": "share found",
    "goodput": "goodput",
}
