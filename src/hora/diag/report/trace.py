"""The latest steps in Chrome's trace event format, a process for each rank: for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Ranks of one host are on one clock; those of others as far as the hosts' clocks agree.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, float64, tensor

from hora.diag.report.device import absolute_s
from hora.diag.report.recorder import RecordedStep, Recorder
from hora.diag.report.slices import Part, cut, travels
from hora.diag.report.wording import say_names
from hora.plan.buckets import BucketFacts

MOST_STEPS: Final = 200
"""Steps that a trace has, the latest ones."""

_STEP, _BUCKET = len(Part), len(Part) + 1
"""What a row is about, beside parts."""
_HOST, _DEVICE, _SUMS = range(3)
_LANES: Final = {_HOST: "host", _DEVICE: "GPU", _SUMS: "sums"}


@dataclass(frozen=True)
class RankTrace:
    """One rank's rows: `[rows, 5]`, float64: lane, what, number of the step or place of the bucket, begin and end in seconds of the wall clock."""

    rows: Tensor
    buckets: tuple[BucketFacts, ...]


def make_trace(recorder: Recorder, buckets: Sequence[BucketFacts]) -> RankTrace:
    """The rows of the latest steps of this rank, whose times are all there; `buckets` were waited for."""
    chosen = list(recorder.steps)[-MOST_STEPS:]
    to_wall_s = time.time() - time.perf_counter()
    numbers = range(recorder.num_steps - len(chosen), recorder.num_steps)
    rows: list[list[float]] = []
    for number, step, device_begin_s in zip(numbers, chosen, _device_begins_s(chosen), strict=True):
        end_s = step.host_s[-1]
        rows.append([_HOST, _STEP, number, step.begin_s + to_wall_s, end_s + to_wall_s])
        rows += ([_HOST, part, number, begin + to_wall_s, end + to_wall_s] for part, begin, end in step.host_slices() if end > begin)
        times_s, begin_s = step.timeline()
        shift_s = to_wall_s + (0.0 if device_begin_s is None else device_begin_s)
        if device_begin_s is not None:
            slices = cut(step.marks, times_s, begin_s)
            rows += ([_DEVICE, part, number, begin + shift_s, end + shift_s] for part, begin, end in slices if end > begin)
        for travel in travels(step.marks, times_s, step.buckets):
            rows.append([_SUMS, _BUCKET, buckets.index(travel.bucket), travel.sent_s + shift_s, travel.summed_s + shift_s])
    return RankTrace(tensor(rows, dtype=float64).view(len(rows), 5), tuple(buckets))


def _device_begins_s(steps: Sequence[RecordedStep]) -> list[float | None]:
    """When steps began on the device, by the host's clock: told backwards from the last one, which is over by now."""
    lengths = [step.device.times_s[-1] for step in steps if step.device is not None and step.device.times_s is not None]
    if len(lengths) < len(steps):
        return [None] * len(steps)
    return list(absolute_s(lengths, steps[-1].host_s[-1]))


def trace_json(traces: Sequence[RankTrace]) -> str:
    """The file."""
    origin_s = min((float(trace.rows[:, 3].min()) for trace in traces if len(trace.rows)), default=0.0)
    events = [event for rank, trace in enumerate(traces) for event in _events(rank, trace, origin_s)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(rank: int, trace: RankTrace, origin_s: float) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for lane in sorted({int(row[0]) for row in trace.rows.tolist()}):
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": _LANES[lane]}}
    for lane, what, number, begin_s, end_s in trace.rows.tolist():
        place = {"ph": "X", "pid": rank, "tid": int(lane), "ts": 1e6 * (begin_s - origin_s), "dur": 1e6 * (end_s - begin_s)}
        yield place | _described(int(what), int(number), trace.buckets)


def _described(what: int, number: int, buckets: Sequence[BucketFacts]) -> dict[str, Any]:
    if what == _BUCKET:
        bucket = buckets[number]
        return {
            "name": f"bucket {bucket.index}",
            "args": {"model": bucket.model, "parameters": say_names(bucket.names), "bytes": bucket.size_bytes},
        }
    name = f"step {number}" if what == _STEP else Part(what).name.lower()
    return {"name": name, "args": {"step": number}}
