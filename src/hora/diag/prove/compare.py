"""Compares two runs step by step: pure functions over records, NumPy alone.

Sizes are relative: the norm of a difference by the norm of the reference's tensor, or a thousandth of all tensors' of its kind if that is more, so
that a gradient that should be zero does not count for its rounding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hora.diag.prove.records import KINDS, Array, Run, StepRecord, TensorFacts
from hora.diag.prove.samples import NOTHING, SampleComparison, compare_samples

STAGES: Final = (
    "initial parameters", "samples", "gradients between ranks", "gradients", "hyperparameters", "parameters", "buffers", "optimizer state",
    "evaluation",
)  # fmt: skip
"""What is compared in a step, in order."""

_STAGE_OF = {"gradient": "gradients", "parameter": "parameters", "buffer": "buffers", "state": "optimizer state"}
_FLOOR = 1e-3
ROUNDING: Final = {"float64": 1e-7, "complex128": 1e-7, "float32": 1e-4, "complex64": 1e-4, "float16": 3e-2, "bfloat16": 3e-2}
"""As large a relative difference as rounding may make in a first step."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same bits, and by how much."""

    name: str
    size: float
    dtype: str

    @property
    def beyond_rounding(self) -> bool:
        """Whether the size is more than rounding may make."""
        return not self.size <= ROUNDING.get(self.dtype, 0.0)


@dataclass(frozen=True)
class StageDifference:
    """What differs in a stage of a step: tensors (the largest difference first), or words for what is no tensor."""

    stage: str
    tensors: tuple[TensorDifference, ...] = ()
    words: str = ""
    beyond_rounding: bool = True

    @property
    def size(self) -> float:
        """The largest relative difference."""
        return max((tensor.size for tensor in self.tensors), default=math.inf)


@dataclass(frozen=True)
class StepComparison:
    """One step of two runs: the stages that are not the same bits, in order."""

    step: int
    stages: Mapping[str, StageDifference] = field(default_factory=dict)
    samples: SampleComparison = NOTHING

    @property
    def same_bits(self) -> bool:
        """Whether everything is."""
        return not self.stages

    @property
    def size(self) -> float:
        """The largest relative difference of a tensor; 0 if there is none."""
        return max((stage.size for stage in self.stages.values() if stage.tensors), default=0.0)

    def only_tensors_of(self, dtype: str | None = None) -> bool:
        """Whether all that is beyond rounding is in tensors compared with the other run's, and in those of `dtype` alone, if that is given."""
        beyond = [stage for stage in self.stages.values() if stage.beyond_rounding]
        return all(
            stage.stage in _STAGE_OF.values()
            and (dtype is None or all(tensor.dtype == dtype for tensor in stage.tensors if tensor.beyond_rounding))
            for stage in beyond
        )

    @property
    def first(self) -> StageDifference | None:
        """The first stage with more than rounding."""
        return next((stage for stage in self.stages.values() if stage.beyond_rounding), None)


def compare_runs(reference: Run, run: Run) -> list[StepComparison]:
    """Step 0 (what was there before the first) and every step that all ranks of both have."""
    steps = min(reference.steps, run.steps)
    return [compare_step(reference, run, step) for step in range(steps + 1)]


def compare_step(reference: Run, run: Run, step: int) -> StepComparison:
    """One step of two runs."""
    theirs, ours = reference.at(step), run.at(step)
    seen = compare_samples([record.forwards for record in ours], [record.forwards for record in theirs]) if step else NOTHING
    found = [_initial(theirs, ours)] if step == 0 else [_samples(seen, theirs, ours), _between_ranks(ours), _groups(theirs, ours)]
    found += [] if step == 0 else [_tensors(kind, theirs, ours) for kind in KINDS]
    stages = {stage.stage: stage for stage in found if stage is not None}
    return StepComparison(step, {name: stages[name] for name in STAGES if name in stages}, seen)


def _initial(theirs: Sequence[StepRecord], ours: Sequence[StepRecord]) -> StageDifference | None:
    found = differing(merged(theirs, "parameter"), merged(ours, "parameter")) or between_ranks(ours, "parameter")
    return StageDifference("initial parameters", found, beyond_rounding=any(each.beyond_rounding for each in found)) if found else None


def _samples(seen: SampleComparison, theirs: Sequence[StepRecord], ours: Sequence[StepRecord]) -> StageDifference | None:
    if seen.seen:
        same = seen.same and not seen.same_on_all_ranks
    else:
        same = sorted(_indices(theirs)) == sorted(_indices(ours))
    return None if same else StageDifference("samples", words=f"{seen.rows} samples, {seen.reference_rows} in the reference")


def _indices(records: Sequence[StepRecord]) -> list[int]:
    return [index for record in records for index in record.samples]


def _between_ranks(ours: Sequence[StepRecord]) -> StageDifference | None:
    found = tuple(each for each in between_ranks(ours, "gradient") if each.beyond_rounding)
    return StageDifference("gradients between ranks", found) if found else None


def _groups(theirs: Sequence[StepRecord], ours: Sequence[StepRecord]) -> StageDifference | None:
    changed = changed_hyperparameters(theirs[0], ours[0])
    words = ", ".join(f"{name} {before} and {now}" for name, (before, now) in changed.items())
    return StageDifference("hyperparameters", words=words) if changed else None


def _tensors(kind: str, theirs: Sequence[StepRecord], ours: Sequence[StepRecord]) -> StageDifference | None:
    found = differing(merged(theirs, kind), merged(ours, kind))
    if kind == "parameter":  # on all ranks, not on the first alone
        known = {each.name for each in found}
        found += tuple(each for each in between_ranks(ours, kind) if each.name not in known)
    return StageDifference(_STAGE_OF[kind], found, beyond_rounding=any(each.beyond_rounding for each in found)) if found else None


def merged(records: Sequence[StepRecord], kind: str) -> dict[str, TensorFacts]:
    """The tensors of a kind as the first rank that has them saw them."""
    found: dict[str, TensorFacts] = {}
    for record in reversed(records):
        found |= record.facts(kind)
    return found


def between_ranks(records: Sequence[StepRecord], kind: str) -> tuple[TensorDifference, ...]:
    """Tensors that the ranks of one run do not have alike, the largest difference first."""
    worst: dict[str, TensorDifference] = {}
    first = merged(records, kind)
    for record in records:
        own = record.facts(kind)
        if kind == "gradient":  # a parameter that this rank did not use has none, but only if its optimizer has the parameter at all
            own = {**{name: _zero(facts) for name, facts in first.items() if name not in own and name in record.facts("parameter")}, **own}
        common = {name: facts for name, facts in first.items() if name in own}
        for each in differing(common, {name: own[name] for name in common}):
            if each.name not in worst or each.size > worst[each.name].size:
                worst[each.name] = each
    return tuple(sorted(worst.values(), key=lambda each: -each.size))


def _zero(like: TensorFacts) -> TensorFacts:
    return TensorFacts(like.shape, like.dtype, "", np.zeros_like(like.sketch))


def differing(reference: Mapping[str, TensorFacts], tensors: Mapping[str, TensorFacts]) -> tuple[TensorDifference, ...]:
    """Tensors that are not the same bits, the largest difference first. A tensor that one side lacks is zero there."""
    floors = _floors(reference)
    found: list[TensorDifference] = []
    for name in {**reference, **tensors}:
        theirs, ours = reference.get(name), tensors.get(name)
        a, b = theirs or _zero(ours or _NO_FACTS), ours or _zero(theirs or _NO_FACTS)
        if a.digest != b.digest and (size := _size(a, b, floors.get(_group_of(name), 0.0))) is not None:
            found.append(TensorDifference(name, size, b.dtype))
    return tuple(sorted(found, key=lambda each: -each.size))


_NO_FACTS = TensorFacts((0,), "float32", "", np.zeros(0))


def _group_of(name: str) -> str:
    """What a tensor of the optimizer is of its parameter (`exp_avg`), or a buffer of its module (`running_var`)."""
    return name.split(" of ")[0] if " of " in name and " of model " not in name else ""


def _floors(reference: Mapping[str, TensorFacts]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, facts in reference.items():
        group = _group_of(name)
        norm = norm_of(facts.sketch)
        squares[group] = squares.get(group, 0.0) + (norm * norm if math.isfinite(norm) else 0.0)
    return {group: _FLOOR * math.sqrt(square) for group, square in squares.items()}


def norm_of(sketch: Array) -> float:
    """The 2-norm of a sketch."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.linalg.norm(sketch))


def _size(a: TensorFacts, b: TensorFacts, floor: float) -> float | None:
    """The relative size of the difference; None for zeros against a gradient that is not there."""
    if a.sketch.shape != b.sketch.shape or a.shape != b.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        apart = norm_of(a.sketch - b.sketch)
    if apart == 0.0:
        return None if "" in (a.digest, b.digest) else 0.0
    scale = max(norm_of(a.sketch), floor)
    return apart / scale if math.isfinite(apart) and scale > 0.0 else math.inf


def changed_hyperparameters(theirs: StepRecord, ours: StepRecord) -> dict[str, tuple[Any, Any]]:
    """Hyperparameters that differ: the reference's value and the run's, by name."""
    changed: dict[str, tuple[Any, Any]] = {}
    if len(theirs.groups) != len(ours.groups):
        return {"number of parameter groups": (len(theirs.groups), len(ours.groups))}
    for before, now in zip(theirs.groups, ours.groups, strict=True):
        for name in {**before, **now}:
            if name not in _BOOKKEEPING and not _alike(before.get(name), now.get(name)):
                changed.setdefault(name, (before.get(name), now.get(name)))
    return changed


_BOOKKEEPING: Final = frozenset({"initial_lr", "max_lr", "min_lr"})
"""What schedulers keep beside the learning rate in force."""


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=0.0) or a == b
    return bool(a == b)
