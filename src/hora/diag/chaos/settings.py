"""What the program of a trial is told: by the scenario that starts it, as JSON on its command line. Loads no torch."""

import json
from dataclasses import asdict, dataclass
from typing import Any

SAMPLES, BATCH = 96, 16
"""Of the data set, and of a global batch: six updates an epoch."""

LOADER_TIMEOUT_S = 3.0
"""How long a rank waits for its loader's workers."""

MANTISSA_BITS = 23
"""Of a weight. Flipped ones above make an infinity or a tiny number of it, which other checks see."""

SLOW_FACTOR = 3
"""So many times as long as the others a slow rank takes for a step of its own."""

MISTAKES = ("dtype", "shape", "view", "op", "kind", "broadcast dtype", "order", "count")
"""What rank 1 can do otherwise than rank 0."""


@dataclass(frozen=True)
class Settings:
    """One run of the workload.

    Attributes:
        directory: of the run, where it leaves its journal and checkpoints; one that is there goes on.
        steps: updates of the whole run.
        save_every: after how many of them a checkpoint is written.
        step_s: least time of an update, spent asleep, so that there is time to act in.
        poison: rank and update whose loss becomes a NaN; `non_finite` says what is to happen then, as `hora.Checks` does.
        stubborn: whether Ctrl-C is noted in the journal and otherwise ignored.
        held: updates after which the ranks wait until there is a file `go-UPDATE` in the directory.
        mistake: what rank 1 does wrong in a collective, in place of training, of `MISTAKES`.
        kill: rank and update at which a rank kills itself, in programs that have no fault points; in their first start.
        samples: of the data set.
        num_workers: of each rank's loader, which waits for them for `LOADER_TIMEOUT_S`.
        ballast_bytes: of what is saved beside model and optimizer.
        tolerant: whether a save that fails is noted in the journal and training goes on.
        check_every: after how many updates the ranks' parameters are compared.
        repair: whether ranks that differ get the parameters of the majority.
        flip: rank, update and bit of the first weight that is flipped on that rank after it; in the first start.
        hoard: rank, and update after which it takes memory until it is killed; in the first start.
        slow: rank, and update after which a step of its own takes it three times `step_s`, which all others take.
    """

    directory: str
    steps: int = 30
    save_every: int = 5
    step_s: float = 0.02
    poison: tuple[int, int] | None = None
    non_finite: str = "raise"
    stubborn: bool = False
    held: tuple[int, ...] = ()
    mistake: str = ""
    kill: tuple[int, int] | None = None
    samples: int = SAMPLES
    num_workers: int = 0
    ballast_bytes: int = 0
    tolerant: bool = False
    check_every: int = 100
    repair: bool = False
    flip: tuple[int, int, int] | None = None
    hoard: tuple[int, int] | None = None
    slow: tuple[int, int] | None = None

    def to_json(self) -> str:
        """The settings as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """The settings of a text of `to_json`."""
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}
        return cls(**fields)
