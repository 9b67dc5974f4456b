"""What came of a comparison: times, and whether the same was trained. Pure.

Rounding alone makes two runs part: sums in another order differ in their last bit, and training magnifies that, more in some models than in others.
How much is measured: the reference is trained a second time with the rows of each batch in another order, and its own runs differ where kernels
do not sum in one order. A variant agrees where its losses are as near to the reference's, give or take a factor, since it sums in yet another order.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

from hora.compare.request import REFERENCE, Request, is_alone

_FLOOR = 1e-5
"""A difference of losses that is always taken for rounding."""
_FACTOR = 20
"""So many times as far as the twin, or another run of the reference, may a variant be from the reference."""
_REVEALING = 0.1
"""Where rounding alone moves a loss by more than this part of it, losses tell little of what a variant trains."""

Point = Mapping[str, Any]
"""What a rank wrote of a training run (`hora.compare.__main__.Trained`)."""


@dataclass(frozen=True)
class Outcome:
    """A variant.

    Attributes:
        variant: its name.
        devices: processes, or GPUs of one.
        times_s: training time of each run, without the steps that warm up.
        speed_up: how many times as fast as the reference, medians of both.
        efficiency: speed-up over the number of devices.
        waiting: share of a step in which sums and late ranks were waited for; None where that cannot be told.
        losses: training loss, by stretch.
        loss: after the last step, on data that were not trained on.
        quality: accuracy or perplexity on them.
        difference: of the losses from the reference's, as a part of these: where it is the most times what rounding does, in all runs.
        allowed: what rounding does, there.
        departs_at: the step by which rounding no longer explains it; None if the variant agrees.
        blurs_at: the step by which rounding alone moves losses so far that they tell little, and no longer count; None if it does not.
        backend, device: what moved the bytes, and what computed.
        eager_because: why steps that should be captured were not.
    """

    variant: str
    devices: int
    times_s: tuple[float, ...]
    speed_up: float
    efficiency: float
    waiting: float | None
    losses: tuple[float, ...]
    loss: float
    quality: float
    difference: float
    allowed: float
    departs_at: int | None
    blurs_at: int | None
    backend: str
    device: str
    eager_because: str | None

    @property
    def median_s(self) -> float:
        """The middle of the runs."""
        return statistics.median(self.times_s)

    @property
    def agrees(self) -> bool:
        """Whether it trains what one process does."""
        return self.departs_at is None


def conclude(points: Mapping[str, Sequence[Point]], twin: Point, request: Request) -> list[Outcome]:
    """The variants in the order asked for, from the training runs of each."""
    reference = points[REFERENCE]
    rounding = _farthest([twin, *reference[1:]], reference[0])
    allowed = [_FLOOR + _FACTOR * most for most in accumulate(rounding, _larger)]
    ends = [*accumulate(request.stretches()), request.steps]
    num_clear = next((index for index, most in enumerate(rounding) if not most <= _REVEALING), len(rounding))
    blurs_at = ends[num_clear] if num_clear < len(ends) else None
    base_s = statistics.median(_time_s(point, request) for point in reference)
    found = []
    for variant in request.variants:
        runs = points[variant]
        apart = _farthest(runs, reference[0])
        # Where losses tell little they convict nobody, but for one that is no number, of which comparisons are false.
        beyond = [
            index
            for index, (far, most) in enumerate(zip(apart, allowed, strict=True))
            if not far <= (most if index < num_clear else math.inf)
        ]
        worst = max(beyond or range(max(num_clear, 1)), key=lambda index: apart[index] / allowed[index])
        times_s = tuple(_time_s(run, request) for run in runs)
        devices = 1 if variant == REFERENCE else request.ranks
        speed_up = base_s / statistics.median(times_s)
        waiting = [run["waiting"] for run in runs if run["waiting"] is not None]
        found.append(
            Outcome(
                variant=variant,
                devices=devices,
                times_s=times_s,
                speed_up=speed_up,
                efficiency=speed_up / devices,
                waiting=statistics.median(waiting) if waiting else None,
                losses=tuple(runs[0]["losses"]),
                loss=runs[0]["loss"],
                quality=runs[0]["quality"],
                difference=apart[worst],
                allowed=allowed[worst],
                departs_at=ends[beyond[0]] if beyond else None,
                blurs_at=blurs_at,
                backend=runs[0]["backend"],
                device=runs[0]["device"],
                eager_because=runs[0]["eager_because"],
            )
        )
    return found


def ranks_of(variant: str, request: Request) -> int:
    """Processes that train it."""
    return 1 if is_alone(variant) else request.ranks


def _time_s(point: Point, request: Request) -> float:
    seconds = point["seconds"]
    return float(sum(seconds[1:] if request.warm_up else seconds))


def _farthest(runs: Sequence[Point], reference: Point) -> list[float]:
    """By stretch, and last for the evaluation, how far the losses of these runs are from the reference's, at most."""
    return [reduce(_larger, of_runs) for of_runs in zip(*(_apart(run, reference) for run in runs), strict=True)]


def _larger(one: float, other: float) -> float:
    """What is no number is larger than any: `max` takes it or leaves it, as they come."""
    return one if math.isnan(one) or one > other else other


def _apart(point: Point, reference: Point) -> list[float]:
    """By stretch, and last for the evaluation, how far the losses are from each other, as a part of the reference's."""
    pairs = zip([*point["losses"], point["loss"]], [*reference["losses"], reference["loss"]], strict=True)
    return [abs(one - other) / max(abs(other), 1e-12) for one, other in pairs]
