"""From the marks of a step and their times to its parts. Pure.

A step is cut at its marks, and each piece belongs to one part: nothing is counted twice, and the parts add up to the step.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from hora.events import Mark
from hora.plan.buckets import BucketFacts


class Part(IntEnum):
    """What a piece of a step is spent on."""

    OUTSIDE = 0
    """Between an update and what the next step begins with."""
    DATA = 1
    COMPUTE = 2
    """Forward and backward; of a step that is replayed from a graph all of it."""
    AGREEMENT = 3
    COMMUNICATION = 4
    """Sums and gathered parameters that are waited for."""
    UPDATE = 5
    """All from the sums to the end of `step()`: dividing, checking, clipping, applying, and what the script does between."""
    DEVICE = 6
    """The host waits for the device."""


class Slice(NamedTuple):
    """A piece of a step, in seconds."""

    part: Part
    begin_s: float
    end_s: float


class Travel(NamedTuple):
    """A bucket: how long it was waited for, how long it took from when it could leave (0 where that cannot be told), when it left and had come."""

    bucket: BucketFacts
    waited_s: float
    took_s: float
    sent_s: float
    summed_s: float


_FROM_HERE = {
    Mark.WINDOW_BEGIN: Part.COMPUTE,
    Mark.BACKWARD_END: Part.COMMUNICATION,
    Mark.SUMS_END: Part.UPDATE,
    Mark.REPLAY_BEGIN: Part.COMPUTE,
    Mark.REPLAY_END: Part.UPDATE,
    Mark.UPDATE_END: Part.OUTSIDE,
}
_ASIDE = {
    Mark.DATA_BEGIN: Part.DATA,
    Mark.AGREE_BEGIN: Part.AGREEMENT,
    Mark.GATHER_BEGIN: Part.COMMUNICATION,
    Mark.DEVICE_BEGIN: Part.DEVICE,
}
_BACK = (Mark.DATA_END, Mark.AGREE_END, Mark.GATHER_END, Mark.DEVICE_END)

_SHORT_S = 5e-5
"""A wait that is no longer than this, or than a tenth of the bucket's way, does not tell when the bucket arrived."""


def cut(marks: Sequence[Mark], times_s: Sequence[float], begin_s: float) -> list[Slice]:
    """The pieces of a step that began at `begin_s` and ended with its last mark, in order."""
    # A loop that says neither when data come nor when a step begins: what is before its backward is taken for forward.
    part = Part.OUTSIDE if Mark.DATA_BEGIN in marks or Mark.WINDOW_BEGIN in marks else Part.COMPUTE
    part = Part.UPDATE if Mark.UPDATE_END in marks[:-1] else part  # of a second optimizer
    aside: Part | None = None
    slices: list[Slice] = []
    for mark, time_s in zip(marks, times_s, strict=True):
        end_s = max(time_s, begin_s)  # streams of a device are not in one order
        slices.append(Slice(part if aside is None else aside, begin_s, end_s))
        begin_s = end_s
        aside = _ASIDE.get(mark) if mark in _ASIDE or mark in _BACK else aside
        part = _FROM_HERE.get(mark, Part.COMPUTE if mark in _BACK and part is Part.OUTSIDE else part)
    return slices


def durations_s(slices: Sequence[Slice]) -> list[float]:
    """Seconds of each part, by its number."""
    sums = [0.0] * len(Part)
    for part, begin_s, end_s in slices:
        sums[part] += end_s - begin_s
    return sums


def travels(marks: Sequence[Mark], times_s: Sequence[float], buckets: Sequence[BucketFacts | None]) -> list[Travel]:
    """What became of each bucket, in the order in which they were waited for."""
    sent: dict[BucketFacts, float] = {}
    found: list[Travel] = []
    free_s = backward_end_s = 0.0
    for mark, time_s, bucket in zip(marks, times_s, buckets, strict=True):
        if mark is Mark.BACKWARD_END:
            backward_end_s = time_s
        elif mark is Mark.BUCKET_SENT and bucket is not None:
            sent[bucket] = time_s
        elif mark is Mark.BUCKET_SUMMED and bucket in sent:
            # Buckets go one after the other: this one could leave when it was sent and the one before had arrived, if that is known.
            waited_s = max(0.0, time_s - max(backward_end_s, sent[bucket], found[-1].summed_s if found else 0.0))
            took_s = time_s - max(sent[bucket], free_s)
            tells = waited_s > max(_SHORT_S, took_s / 10)
            free_s = time_s if tells else free_s
            found.append(Travel(bucket, waited_s, took_s if tells else 0.0, sent[bucket], time_s))
    return found
