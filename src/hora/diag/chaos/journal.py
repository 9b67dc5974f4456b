"""What the ranks of a trial did, and when: a line of JSON an event, in a file for each rank and start. Loads no torch.

A line is written by one call and survives the death of its writer; times are those of the system's monotonic clock, the same for all processes.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "journal"


@dataclass(frozen=True)
class Event:
    """Something that a rank did.

    Attributes:
        start: which start of which job it belongs to.
        name: "begin" (with pid), "resumed", "samples" (epoch, step, ids), "step", "held" (day_s, the time of day), "saved", "unsaved" (said),
            "stopped", "asked", "flipped", "hoarding", "calling", "passed", "refused" (said), "killing", "end" (digest, skipped, day_s); where it
            makes sense with `done`, the updates that the run has made.
    """

    at_s: float
    start: str
    rank: int
    name: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Updates made."""
        return int(self.fields.get("done", 0))


class Journal:
    """The journal of this rank in this start."""

    def __init__(self, directory: Path, start: str, rank: int) -> None:
        (directory / FOLDER).mkdir(parents=True, exist_ok=True)
        self._head = {"start": start, "rank": rank}
        self._file = os.open(directory / FOLDER / f"{start}-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.note("begin", pid=os.getpid())

    def note(self, name: str, **fields: Any) -> None:
        """Writes an event down."""
        line = {"at_s": time.monotonic(), **self._head, "name": name, "fields": fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def read_events(directory: Path) -> list[Event]:
    """All events so far, in their order."""
    return sorted((event for path in (directory / FOLDER).glob("*.jsonl") for event in _read(path)), key=lambda event: event.at_s)


def _read(path: Path) -> Iterator[Event]:
    text = path.read_text(encoding="utf-8")
    yield from (Event(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines())


def starts_of(events: Sequence[Event]) -> list[str]:
    """The starts in their order."""
    return list(dict.fromkeys(event.start for event in events))


def named(events: Sequence[Event], name: str, start: str | None = None) -> list[Event]:
    """The events of a name, of one start or of all."""
    return [event for event in events if event.name == name and start in (None, event.start)]


def recovery(events: Sequence[Event], struck_s: float) -> dict[str, float]:
    """Updates that were lost by a fault in the first start, and seconds from it until the second start came further than the first had."""
    first, *others = starts_of(events)
    if not others:
        return {}
    before = max((event.done for event in named(events, "step", first)), default=0)
    resumed = next((event.done for event in named(events, "resumed", others[0])), 0)
    further = next((event.at_s for event in named(events, "step", others[0]) if event.done > before), None)
    return {"lost_steps": before - resumed} | ({} if further is None else {"recovered_s": further - struck_s})
