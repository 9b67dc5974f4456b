"""Why two runs differ, as far as their records show it: pure functions over records, each for one kind of cause.

Each gives findings that are sure, or none. What only another run can show (rounding, dropout, BatchNorm, missing seeds) is in `inquiry`.
"""

from collections.abc import Callable, Iterator
from typing import Final

from hora.diag.prove.causes.case import Case
from hora.diag.prove.causes.ranks import buffers, initialisation, synchronisation
from hora.diag.prove.causes.samples import evaluation, other_samples, repeated_epochs, uneven, uneven_steps
from hora.diag.prove.causes.updates import gradients, hyperparameters
from hora.diag.prove.findings import Finding

__all__ = ["Case", "find_causes", "uneven_steps"]

_LOOKS: Final[tuple[Callable[[Case], Iterator[Finding]], ...]] = (
    initialisation, other_samples, uneven, synchronisation, gradients, hyperparameters, buffers, evaluation, repeated_epochs,
)  # fmt: skip


def find_causes(case: Case) -> list[Finding]:
    """Everything that the records show, the cause to begin with first."""
    found = [finding for look in _LOOKS for finding in look(case)]
    # A global batch that grows explains all that comes later, so it is said first.
    return sorted(found, key=lambda finding: (finding.code != "global-batch-grows", _stage(finding), finding.step or 0))


def _stage(finding: Finding) -> int:
    return _ORDER.index(finding.code) if finding.code in _ORDER else len(_ORDER)


_ORDER: Final = ("global-batch-grows", "initialisation-differs-between-ranks", "initialisation-differs", "same-samples-on-all-ranks")
