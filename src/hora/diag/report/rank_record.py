"""What a rank tells the others of its steps: parts of each step and waits for each bucket, as two tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hora.diag.report.recorder import RecordedStep, Recorder
from hora.diag.report.slices import Part, Travel, cut, durations_s, travels
from hora.events import Mark
from hora.plan.buckets import BucketFacts

TOOK, BYTES, NUM_TRAVELS, REPLAYED, HOST, HOST_BOUND = range(len(Part), len(Part) + 6)
"""Columns behind those of the parts: seconds, bytes and number of the large buckets whose way is known; whether the step was a graph; seconds that
the host took to start it, and whether the device was waiting for that."""

NUM_COLUMNS: Final = HOST_BOUND + 1

_LEAST_BYTES: Final = 2**16
"""Of smaller sums it is the messages that take the time, not the bytes."""

_AS_LONG: Final = 1.1
"""Up to so many times what the host took for forward and backward, the device has waited for the host in them."""


@dataclass(frozen=True)
class RankRecord:
    """One rank's steps.

    Attributes:
        host: name of its machine.
        dropped: steps before these, of which nothing is left.
        warm_up: those of all steps that are to be left out.
        steps: `[steps, NUM_COLUMNS]`, float64.
        buckets: those that were waited for.
        waited: `[steps, buckets]`, seconds.
        gathers: whether parameters are gathered after sums that leave each rank a part alone.
    """

    host: str
    dropped: int
    warm_up: int
    steps: Tensor
    buckets: tuple[BucketFacts, ...]
    waited: Tensor
    gathers: bool


def make_record(host: str, recorder: Recorder) -> RankRecord:
    """The record of the steps of this rank, whose times are all there."""
    recorded = list(recorder.steps)
    dropped = recorder.num_steps - len(recorded)
    rows: list[list[float]] = []
    ways: list[list[Travel]] = []
    for step in recorded:
        times_s, begin_s = step.timeline()
        found = travels(step.marks, times_s, step.buckets)
        rows.append([*durations_s(cut(step.marks, times_s, begin_s)), *_sums_of(found), *_host_of(step)])
        ways.append(found)
    # In the order of their numbers, which is the same on all ranks.
    buckets = tuple(sorted({travel.bucket for found in ways for travel in found}, key=lambda bucket: (bucket.model, bucket.index)))
    waited = [[waits.get(bucket, 0.0) for bucket in buckets] for waits in map(_waits, ways)]
    return RankRecord(
        host,
        dropped,
        recorder.warm_up,
        torch.tensor(rows, dtype=torch.float64).view(len(rows), NUM_COLUMNS),
        buckets,
        torch.tensor(waited, dtype=torch.float64).view(len(rows), len(buckets)),
        any(Mark.GATHER_BEGIN in step.marks for step in recorded),
    )


def _waits(found: Sequence[Travel]) -> dict[BucketFacts, float]:
    waits: dict[BucketFacts, float] = {}
    for travel in found:
        waits[travel.bucket] = waits.get(travel.bucket, 0.0) + travel.waited_s
    return waits


def _sums_of(found: Sequence[Travel]) -> tuple[float, float, float]:
    known = [travel for travel in found if travel.took_s > 0 and travel.bucket.size_bytes >= _LEAST_BYTES]
    return sum(travel.took_s for travel in known), float(sum(travel.bucket.size_bytes for travel in known)), float(len(known))


def _host_of(step: RecordedStep) -> tuple[float, float, float]:
    own = durations_s(step.host_slices())
    times_s, begin_s = step.timeline()
    # A device that is done as soon as the host has told it what to do waits for the host.
    as_long = durations_s(cut(step.marks, times_s, begin_s))[Part.COMPUTE] <= _AS_LONG * own[Part.COMPUTE]
    host_bound = step.device is not None and step.device.close_behind and as_long
    return float(Mark.REPLAY_BEGIN in step.marks), own[Part.COMPUTE] + own[Part.UPDATE], float(host_bound)
