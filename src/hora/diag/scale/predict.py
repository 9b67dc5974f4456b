"""What a step is expected to take on more ranks than were measured. Pure.

A step on n ranks is the one of the largest number m that was measured, with each part changed by what the model says of it:

- forward and backward, and waiting for data: unchanged where the batch of a rank stays (weak); where the global batch stays (strong), a part that is
  there in any case and one that is dealt out, fitted to all numbers that were measured;
- exposed communication: what the sums take longer than on m ranks, less what backward hides: as much as it hid on m ranks, as far as that is known,
  and in proportion to it where it becomes shorter. Where the sums of the bench are faster than those of the step, in proportion to the bench's;
- agreement: grows by the latency of the messages that are more;
- the update, and what is between steps: unchanged.

Assumed: the further ranks are like those measured, and as near to each other; hosts and GPUs are not late more often than on m ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hora.diag.scale.point import Point
from hora.diag.scale.wire import Wire

_DEALT_OUT = ("compute", "data")


@dataclass(frozen=True)
class Prediction:
    """A step on `ranks` ranks, in seconds: what is expected, and from the most hopeful of the models to the least."""

    ranks: int
    step_s: float
    low_s: float
    high_s: float


def predict(points: Sequence[Point], wires: Sequence[Wire], kind: str, ranks: int) -> Prediction:
    """The step on `ranks` ranks, from `points` (of which one has more than one rank) and what is known of sums."""
    last = max(points, key=lambda point: point.ranks)
    own = sum(_dealt_out(points, part, kind, ranks) - last.parts_s[part] for part in _DEALT_OUT)
    ratio = _dealt_out(points, "compute", kind, ranks) / last.parts_s["compute"] if last.parts_s["compute"] else 1.0
    known: Sequence[Wire | None] = wires or [None]
    found = [_communication_s(last, wire, ranks, ratio) - last.parts_s["communication"] for wire in known]
    expected = found[0]
    noise = max(last.spread, max((wire.error for wire in wires), default=0.0) * abs(expected) / last.median_s)
    steps = [max(last.median_s + own + change, 0.0) for change in (expected, min(found), max(found))]
    # However much the runs differ, a step takes some time: a line to a half, and from there on a curve that goes on with its slope.
    return Prediction(ranks, steps[0], steps[1] * (1 - noise if noise <= 0.5 else 0.25 / noise), steps[2] * (1 + noise))


def _dealt_out(points: Sequence[Point], part: str, kind: str, ranks: int) -> float:
    last = max(points, key=lambda point: point.ranks)
    if kind == "weak":
        return last.parts_s[part]
    if len(points) == 1:
        return last.parts_s[part] * last.ranks / ranks
    always, dealt = _line([(1 / point.ranks, point.parts_s[part]) for point in points])
    # Through the last point, so that the step on as many ranks is the one that was measured.
    return last.parts_s[part] + dealt * (1 / ranks - 1 / last.ranks) if always >= 0 else last.parts_s[part] * last.ranks / ranks


def _line(places: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares of y over x: where it crosses x = 0, and its slope, which is 0 at least."""
    mean_x, mean_y = (sum(place[i] for place in places) / len(places) for i in (0, 1))
    variance = sum((x - mean_x) ** 2 for x, _ in places)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in places) / variance)
    return mean_y - slope * mean_x, slope


def _communication_s(last: Point, wire: Wire | None, ranks: int, ratio: float) -> float:
    """Exposed communication, and what agreement grows by."""
    exposed = last.parts_s["communication"]
    if wire is None or not last.sums_bytes:
        return exposed * ((ranks - 1) / ranks) / ((last.ranks - 1) / last.ranks)  # bytes alone, as of a ring
    before, after = (sum(wire.took_s(n, size) for size in last.sums_bytes) for n in (last.ranks, ranks))
    more_messages = max(0.0, wire.messages_s(ranks) - wire.messages_s(last.ranks))
    if before <= exposed:
        return exposed * after / before + more_messages
    hidden = (before - exposed) * min(1.0, ratio)
    return max(after - hidden, exposed * min(1.0, after / before)) + more_messages
