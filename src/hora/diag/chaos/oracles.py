"""What must hold of every trial, whatever its fault was. Each oracle yields what is wrong, in words."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hora.diag.chaos.journal import Event, named, starts_of
from hora.diag.chaos.settings import BATCH, SAMPLES
from hora.diag.chaos.trial import Trial

GONE_S = 1.0
"""How soon after the launcher's end everybody must be gone."""


def ended_with(code: int, wanted: int) -> Iterator[str]:
    """The exit code."""
    if code != wanted:
        yield f"the exit code must be {wanted}, but is {code}"


def same_bits(events: Sequence[Event], golden: str) -> Iterator[str]:
    """Weights and optimizer state at the end are, on all ranks, those of the run that nothing happened to."""
    digests = {event.fields["digest"] for event in named(events, "end")}
    if digests != {golden}:
        yield f"the weights must be {golden[:12]}, but are {', '.join(sorted(digest[:12] for digest in digests)) or 'nobody has finished'}"


def each_sample_once(events: Sequence[Event], steps: int, samples: int = SAMPLES) -> Iterator[str]:
    """In the updates that made the weights each epoch has each sample once: those of the last start that made an update count."""
    order = {start: place for place, start in enumerate(starts_of(events))}
    last: dict[tuple[int, int], str] = {}
    given: dict[tuple[str, int, int], list[int]] = {}
    for event in named(events, "samples"):
        update = event.fields["epoch"], event.fields["step"]
        last[update] = max(last.get(update, event.start), event.start, key=order.__getitem__)
        given.setdefault((event.start, *update), []).extend(event.fields["ids"])
    per_epoch = -(-samples // BATCH)
    for epoch in range(steps // per_epoch):
        counts = Counter(index for step in range(per_epoch) for index in given.get((last.get((epoch, step), ""), epoch, step), []))
        if counts != Counter(range(samples)):
            again = [index for index, count in counts.items() if count > 1]
            missing = set(range(samples)) - set(counts)
            yield f"epoch {epoch} must have each sample once, but has {len(again)} several times and lacks {len(missing)}"


def nobody_left(trial: Trial, since_s: float) -> Iterator[str]:
    """No process of the job is left a moment after its end, and no file."""
    if (left := trial.members()) and trial.gone_after(since_s, left) > GONE_S:
        yield f"still there {GONE_S:g} s after the end: {', '.join(str(process.pid) for process in left)}"
    if files := trial.leftovers():
        yield f"left behind: {', '.join(files)}"


def one_writer(events: Sequence[Event]) -> Iterator[str]:
    """Of two starts of a job the later one begins to train when the earlier one has made its last update and its last save."""
    for earlier, later in pairwise(starts_of(events)):
        last_s = max(event.at_s for event in events if event.start == earlier)
        resumed_s = min((event.at_s for event in named(events, "resumed", later)), default=math.inf)
        if last_s > resumed_s:
            yield f"start {later} had gone on for {last_s - resumed_s:.2f} s when start {earlier} made its last word"


def says(text: str, *patterns: str) -> Iterator[str]:
    """What was said names who and what."""
    yield from (f"nothing was said of {pattern!r}" for pattern in patterns if not re.search(pattern, text))
