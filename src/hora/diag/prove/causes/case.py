"""Two runs to be explained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hora.diag.prove.compare import StepComparison, compare_runs
from hora.diag.prove.findings import ranks_of
from hora.diag.prove.records import Run

_GROWTH_IN_FLOAT64: Final = 1000.0
"""How many times larger a step may make rounding, at most: less than what parts a fault from rounding in float64."""

_GROWTH: Final = 10.0
"""The same where rounding is not so small."""


@dataclass(frozen=True)
class Case:
    """Two runs and how they compare: step 0 is what was there before the first. The reference is the run on fewer ranks."""

    reference: Run
    run: Run
    steps: Sequence[StepComparison]

    @classmethod
    def of(cls, one: Run, other: Run) -> "Case":
        """Compares the two."""
        reference, run = sorted((one, other), key=lambda each: each.ranks)
        return cls(reference, run, compare_runs(reference, run))

    @property
    def times(self) -> float:
        """How many times as many ranks the run has; more than 1."""
        return self.run.ranks / self.reference.ranks

    @property
    def first(self) -> StepComparison | None:
        """The first step with more than rounding; in float64, with more than what rounding may have grown to."""
        return self._first("float64", _GROWTH_IN_FLOAT64)

    @property
    def first_leap(self) -> StepComparison | None:
        """The same for scripts that cannot be run in float64: rounding may grow in any precision, from step to step."""
        return self._first(None, _GROWTH)

    def _first(self, dtype: str | None, growth: float) -> StepComparison | None:
        before = 0.0
        for step in self.steps:
            if step.first is not None and not (step.only_tensors_of(dtype) and step.size <= growth * before):
                return step
            before = max(before, step.size)
        return None

    @property
    def titles(self) -> tuple[str, str]:
        """The run and the reference in words."""
        return ranks_of(self.run.ranks), ranks_of(self.reference.ranks)

    @property
    def lr_ratio(self) -> float:
        """How many times the reference's learning rate the run has in the first step; NaN if that cannot be told."""
        rates = [run.at(1)[0].groups[0].get("lr") if run.steps and run.at(1)[0].groups else None for run in (self.run, self.reference)]
        return rates[0] / rates[1] if numeric(rates) and rates[1] else math.nan


def numeric(values: Sequence[Any]) -> bool:
    """Whether all are numbers."""
    return all(isinstance(value, int | float) for value in values)


def near(a: float, b: float) -> bool:
    """Whether two factors are the same, to a thousandth."""
    return math.isclose(a, b, rel_tol=1e-3)
