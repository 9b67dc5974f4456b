"""One sentence: what to change first. Pure: computed from the figures of a report, and from nothing else."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from hora.diag.report.step_report import BucketReport, Lateness, StepReport
from hora.diag.report.wording import ms, percent, say_bytes, say_names

_NOTICEABLE: Final = 0.1
"""Part of the time below which nothing is said."""
_LARGE_UPDATE: Final = 0.3
_HOST_BOUND: Final = 0.5
_HALF: Final = 0.5
"""Of an update, or of what a GPU computes while it waits for the host: about what may be won, where it cannot be told."""


class Finding(NamedTuple):
    """What could be said, and which part of the time may be won."""

    share: float
    sentence: str


def advise(report: StepReport) -> str:
    """The sentence about what takes most of the time that need not be."""
    found = [finding for finding in _findings(report) if finding.share >= _NOTICEABLE]
    if found:
        return max(found).sentence
    return f"nothing stands out: compute is {percent(report.times.compute.share)} of a step"


def _findings(report: StepReport) -> Iterator[Finding]:
    times = report.times
    yield Finding(
        times.data.share,
        f"data wait is {percent(times.data.share)} of a step: give the loader more workers (num_workers), or make a sample cheaper to load",
    )
    yield Finding(
        times.outside.share,
        f"{percent(times.outside.share)} of the time lies between steps: evaluation, checkpoints, logging, or a loader that is not Hora's",
    )
    if times.update.share >= _LARGE_UPDATE:
        yield Finding(_HALF * times.update.share, _of_update(report))
    if report.host_bound is not None and report.host_bound >= _HOST_BOUND:
        yield Finding(_HALF * times.compute.share * report.host_bound, _of_host(report.host_bound))
    if report.world_size > 1:
        yield from _findings_among_ranks(report)


def _findings_among_ranks(report: StepReport) -> Iterator[Finding]:
    communication, agreement = report.times.communication.share, report.times.agreement.share
    # A parameter by itself cannot leave in parts.
    cure = _RARER if report.bucket is not None and len(report.bucket.names) == 1 else _RARER_AND_EARLIER
    yield Finding(communication, f"exposed communication is {percent(communication)} of a step{_of_bucket(report.bucket)}: {cure}")
    yield Finding(agreement, f"agreeing on the update, a message between the hosts, is {percent(agreement)} of a step: {_RARER}")
    if report.late is not None:
        yield Finding(report.late.share, _of_late(report.late))


_RARER = "more micro-batches a step (a larger global_batch_size) make it rarer"
_RARER_AND_EARLIER = f"{_RARER}, and with a smaller bucket_cap_bytes gradients leave earlier"


def _of_update(report: StepReport) -> str:
    sharded = 'strategy="sharded" deals it out over the ranks, and ' if report.world_size > 1 else ""
    return f"the update is {percent(report.times.update.share)} of a step: {sharded}{_RARER}"


def _of_host(host_bound: float) -> str:
    return f"the GPU waits for the host in {percent(host_bound)} of the steps: hora.TrainStep replays steps from a CUDA graph"


def _of_bucket(bucket: BucketReport | None) -> str:
    if bucket is None:
        return ""
    names, size = say_names(bucket.names), say_bytes(bucket.size_bytes)
    return f", most of it for bucket {bucket.index} ({names}; {size}), {ms(bucket.wait.median_s)}"


_NAMES = {"data": "data wait", "compute": "compute", "update": "update", "outside": "time between steps"}
_CURES = {
    "data": "give its loader more workers (num_workers), or look at the disk that it reads from",
    "compute": "look at what else runs on its processor, or whether its samples are longer",
    "update": "look at what it does between backward and the end of step()",
    "outside": "look at what it does between steps: evaluation, checkpoints, logging",
}
_LEAST: Final = 0.1
"""Part of its own time below which that of the others is nothing to compare with."""


def _of_late(late: Lateness) -> str:
    took = f"{ms(late.own_s)}, {ms(late.others_s)} on the others"
    because = f"because of its {_NAMES[late.because]}"
    if late.rank is None:
        cure = (
            "see what else runs on their processors, or deal out samples of like length"
            if late.because == "compute"
            else "see whether all ranks do it alike"
        )
        return f"in {percent(late.steps)} of the steps the ranks wait {ms(late.by_s)} for one of them, in turns, {because} ({took}): {cure}"
    longer = f", {percent(late.own_s / late.others_s - 1)} longer" if late.others_s > _LEAST * late.own_s else ""
    return (
        f"rank {late.rank} comes last to {percent(late.steps)} of the sums, {ms(late.by_s)} after the others, {because} "
        f"({took}{longer}): {_CURES[late.because]}"
    )
