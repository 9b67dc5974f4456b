"""What one look at the machine has found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Grade = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        name: what was looked at.
        grade: "wrong": Hora cannot work like this; "warning": it works, or not everything does, and more slowly than it could.
        found: what is there.
        remedy: what to do, unless all is well.
        host: where, if several hosts were looked at; empty for what is between them.
    """

    name: str
    grade: Grade
    found: str
    remedy: str = ""
    host: str | None = None


Look = Callable[[], Iterator[Finding]]


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """Something could be better."""
    return Finding(name, "warning", found, remedy)


def wrong(name: str, found: str, remedy: str) -> Finding:
    """Something must be mended."""
    return Finding(name, "wrong", found, remedy)


def examine(looks: dict[str, Look]) -> Iterator[Finding]:
    """Carries the looks out; one that fails itself is a warning."""
    for name, look in looks.items():
        try:
            yield from look()
        except Exception as error:  # a doctor does not fall ill
            yield warning(
                name, f"could not be looked at: {type(error).__name__}: {error}", "look yourself, and tell the developers of Hora"
            )
