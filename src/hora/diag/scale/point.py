"""What the runs with one number of ranks came to, from the reports that they left (`hora run --report-json`)."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PARTS = ("outside", "data", "compute", "agreement", "communication", "update", "device")
"""Of a step, as in `hora.diag.report.step_report.Parts`."""


@dataclass(frozen=True)
class Point:
    """A number of ranks that was measured.

    Attributes:
        ranks: how many.
        step_s: median step of each run, seconds.
        parts_s: medians over the runs of the parts' medians, seconds.
        late: which part of all time the other ranks waited for one that came last.
        sums_bytes: sizes of the sums of a step, where known.
        backend: what moved the bytes.
        device: "cpu" or "cuda".
        replayed: share of the steps that were replayed from a CUDA graph.
        advice: of the run in the middle.
        steps: that the shortest run was judged by.
    """

    ranks: int
    step_s: tuple[float, ...]
    parts_s: Mapping[str, float]
    late: float
    sums_bytes: tuple[int, ...]
    backend: str
    device: str
    replayed: float
    advice: str
    steps: int

    @property
    def median_s(self) -> float:
        """A step."""
        return statistics.median(self.step_s)

    @property
    def spread(self) -> float:
        """Half of what lies between the slowest and the fastest run, as a part of the median."""
        return (max(self.step_s) - min(self.step_s)) / 2 / self.median_s


def point_of(ranks: int, reports: Sequence[Mapping[str, Any]]) -> Point:
    """The point that `reports`, the JSON of all runs with `ranks` ranks, make."""
    middle = sorted(reports, key=_step_s)[len(reports) // 2]
    return Point(
        ranks=ranks,
        step_s=tuple(map(_step_s, reports)),
        parts_s={part: statistics.median(report["times"][part]["median_s"] for report in reports) for part in PARTS},
        late=statistics.median((report["late"] or {"share": 0.0})["share"] for report in reports),
        sums_bytes=tuple(middle["sums_bytes"]),
        backend=middle["backend"],
        device=middle["device"],
        replayed=middle["replayed"],
        advice=middle["advice"],
        steps=min(report["steps"] for report in reports),
    )


def _step_s(report: Mapping[str, Any]) -> float:
    return float(report["times"]["step"]["median_s"])


def speed_up(kind: str, base: Point, ranks: int, step_s: float) -> float:
    """How many times the samples of `base`, per rank of it, are trained in a second."""
    work = ranks / base.ranks if kind == "weak" else 1.0
    return base.ranks * work * base.median_s / step_s


def efficiency(kind: str, base: Point, ranks: int, step_s: float) -> float:
    """Speed-up over the number of ranks."""
    return speed_up(kind, base, ranks, step_s) / ranks
