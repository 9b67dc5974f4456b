"""What is checked in every training loop unless it is switched off, and what happens then."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

from hora.errors import ConfigError

NonFinitePolicy = Literal["raise", "skip", "warn", "ignore"]


@dataclass(frozen=True)
class Checks:
    """What `DistributedOptimizer` checks; the same on all ranks.

    Attributes:
        non_finite: what happens at an update whose gradient has a NaN or an infinity on any rank. No rank applies it, and all of them "raise"
            `NonFiniteGradient`, "warn", or "skip" it with a count (`skipped_steps`); "ignore" does not look, and applies it.
        check_every: after how many updates the ranks' parameters are compared; 0: never.
        repair: give ranks whose parameters differ those of the majority, with a warning, instead of raising `ReplicaMismatch`.

    Raises:
        ConfigError: a value is out of its range.
    """

    non_finite: NonFinitePolicy = "raise"
    check_every: int = 100
    repair: bool = False

    def __post_init__(self) -> None:
        if self.non_finite not in get_args(NonFinitePolicy):
            raise ConfigError(f"non_finite must be one of {', '.join(get_args(NonFinitePolicy))}, but is {self.non_finite!r} instead")
        every: Any = self.check_every
        if not (isinstance(every, Integral) and int(every) >= 0):
            raise ConfigError(f"check_every must be 0 (never) or a greater whole number, but is {every!r} instead")
        if not isinstance(self.repair, bool):
            raise ConfigError(f"repair must be True or False, but is {self.repair!r} instead")
