"""A finding: what was seen, by which code it is known, and what to do. All sentences that users read about causes stand in `causes` and `ablated`."""

from dataclasses import dataclass
from typing import Final

HARMLESS: Final = frozenset({"order-of-summation", "set-epoch-forgotten"})
"""Findings that do not make the runs differ beyond rounding."""


@dataclass(frozen=True)
class Finding:
    """One cause, or fault that was seen.

    Attributes:
        code: its name in the table of causes.
        seen: the evidence, one sentence.
        advice: what to do, one sentence.
        step: where it was first seen; None if it is none of a step.
        of_evaluation: whether it is about evaluation, which explains nothing in training.
    """

    code: str
    seen: str
    advice: str
    step: int | None = None
    of_evaluation: bool = False


def ranks_of(number: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} rank{'' if number == 1 else 's'}"


def some(names: list[str], most: int = 3) -> str:
    """The first few names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
