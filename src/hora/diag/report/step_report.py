"""What a report says, in numbers. Times are in seconds, sizes in bytes, bandwidths in GB/s (10^9 bytes a second)."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """A time in all steps: median, 95th percentile, and which part of all time it is (0 to 1)."""

    median_s: float
    p95_s: float
    share: float


@dataclass(frozen=True)
class Parts:
    """A step, and what it consists of; the parts add up to the step, step by step.

    Attributes:
        outside: between an update and what the next step begins with: evaluation, checkpoints, logging, a loader that is not Hora's. 0 in a loop that
            has neither `micro_batches` nor a loader of Hora's, where it counts as compute.
        data: the loader was waited for.
        compute: forward and backward; all of a step that was replayed from a CUDA graph.
        agreement: the other ranks' word was waited for, that they make the same update.
        communication: sums were waited for after backward had ended, or parameters that other ranks have updated.
        update: from the sums to the end of `step()`.
        device: the host waited for the device; 0 where times are those of the device.
    """

    step: Spread
    outside: Spread
    data: Spread
    compute: Spread
    agreement: Spread
    communication: Spread
    update: Spread
    device: Spread


@dataclass(frozen=True)
class RankReport:
    """One rank: its machine, its own times, and in which share of the steps it came last to the sums."""

    rank: int
    host: str
    times: Parts
    last: float


@dataclass(frozen=True)
class BucketReport:
    """The bucket that was waited for longest: its parameters, its bytes, and how long."""

    model: int
    index: int
    names: tuple[str, ...]
    size_bytes: int
    wait: Spread


@dataclass(frozen=True)
class Lateness:
    """The other ranks waited for one that came last.

    Attributes:
        rank: the one; None if the ranks took turns.
        steps: share of the steps in which it, or any rank, was clearly last.
        by_s: how long the others waited for it, median of these steps.
        share: which part of all time that is.
        because: "data", "compute", "update" or "outside": where it took longer than the others.
        own_s: how long it took there, and `others_s` the others.
    """

    rank: int | None
    steps: float
    by_s: float
    share: float
    because: str
    own_s: float
    others_s: float


@dataclass(frozen=True)
class Bandwidth:
    """Bytes of gradients over the time that their sums took, where that can be told; `measured` is what the bench had for such sizes, if it ran."""

    achieved: float
    bucket_bytes: int
    measured: float | None


@dataclass(frozen=True)
class StepReport:
    """Where the time of a step goes; the same on every rank. `str()` of it is a table.

    Attributes:
        steps: that were looked at, the latest of all.
        left_out: steps before them that were not: the first ones.
        backend: what moved the bytes.
        device: "cpu" or "cuda", by whose clock.
        replayed: share of the steps that were replayed from a CUDA graph.
        times: of each step those of the rank that came last to the sums, for which the others waited: what it took, the step took.
        host: on GPUs how long the host took to start a step.
        host_bound: on GPUs the share of the steps in which the device waited for the host.
        bucket: None where no sum was waited for, in exact mode, and in replayed steps.
        late: None where no rank came clearly last.
        bandwidth: None where no sum was waited for, or small ones only.
        sums_bytes: sizes of the sums of a step; empty where they are not told apart, as `bucket`.
        ranks: each one by itself.
        advice: one sentence: what to change first.
    """

    steps: int
    left_out: int
    world_size: int
    backend: str
    device: str
    replayed: float
    times: Parts
    host: Spread | None
    host_bound: float | None
    bucket: BucketReport | None
    late: Lateness | None
    bandwidth: Bandwidth | None
    sums_bytes: tuple[int, ...]
    ranks: tuple[RankReport, ...]
    advice: str = ""

    def __str__(self) -> str:
        from hora.diag.report.show import show

        return show(self)

    def as_json(self) -> dict[str, Any]:
        """The report as objects, lists, words and numbers."""
        return asdict(self)
