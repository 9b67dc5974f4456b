"""What was found for one number of ranks: a verdict for each step, where it differs first, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hora.diag.prove.causes import Case
from hora.diag.prove.compare import StageDifference, StepComparison
from hora.diag.prove.findings import HARMLESS, Finding

SAME_BITS: Final = "same bits"
ROUNDED: Final = "same within rounding"
DIFFERS: Final = "differs"


@dataclass(frozen=True)
class Cell:
    """One step of one number of ranks: the verdict, the largest relative difference of a tensor, and where it first lies."""

    step: int
    verdict: str
    size: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What was found for one number of ranks.

    Attributes:
        first: where it differs first by more than rounding: the step, and the stage with its tensors.
    """

    ranks: int
    cells: tuple[Cell, ...] = ()
    findings: tuple[Finding, ...] = ()
    first: tuple[int, StageDifference] | None = None

    @property
    def same_bits(self) -> bool:
        """Whether every bit of every step is the reference's, and nothing else was found."""
        return all(cell.verdict == SAME_BITS for cell in self.cells) and not self.causes

    @property
    def agrees(self) -> bool:
        """Whether nothing differs beyond rounding."""
        return all(cell.verdict != DIFFERS for cell in self.cells) and not self.causes

    @property
    def causes(self) -> tuple[Finding, ...]:
        """Findings that make a difference."""
        return tuple(finding for finding in self.findings if finding.code not in HARMLESS)


def conclude(ranks: int, case: Case, findings: Sequence[Finding], *, rounding: bool, sharp: Case | None = None) -> Answer:
    """The answer for one number of ranks.

    Args:
        ranks: that number.
        case: the two runs.
        findings: the cause first.
        rounding: whether all differences were shown to be rounding.
        sharp: the two runs in float64, where those tell more exactly where the difference begins.
    """
    firsts = [found for found in (case.first, sharp.first if sharp is not None else None) if found is not None]
    first = None if rounding else min(firsts, key=lambda found: found.step, default=None)
    cells = tuple(_cell(step, first) for step in case.steps[1:])
    place = None if first is None or first.first is None else (first.step, first.first)
    return Answer(ranks, cells, tuple(findings), place)


def _cell(step: StepComparison, first: StepComparison | None) -> Cell:
    if step.same_bits:
        return Cell(step.step, SAME_BITS)
    return Cell(step.step, DIFFERS if first is not None and step.step >= first.step else ROUNDED, step.size)
