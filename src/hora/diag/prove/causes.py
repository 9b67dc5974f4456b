"""Why two runs differ, as far as their records show it: pure functions over records, each for one kind of cause.

Each gives findings that are sure, or none. What only another run can show (rounding, dropout, BatchNorm, missing seeds) is in `inquiry`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hora.diag.prove import samples
from hora.diag.prove.compare import ROUNDING, StepComparison, between_ranks, changed_hyperparameters, compare_runs, merged, norm_of
from hora.diag.prove.findings import Finding, ranks_of, some
from hora.diag.prove.records import Run, StepRecord

_FACTOR_TOLERANCE: Final = 1e-3
_LOSS_TOLERANCE: Final = 1e-4
_GROWTH: Final = 100.0
"""How many times larger a step may make rounding, at most."""


@dataclass(frozen=True)
class Case:
    """Two runs and how they compare: step 0 is what was there before the first. The reference is the run on fewer ranks."""

    reference: Run
    run: Run
    steps: Sequence[StepComparison]

    @classmethod
    def of(cls, one: Run, other: Run) -> "Case":
        """Compares the two."""
        reference, run = sorted((one, other), key=lambda each: each.ranks)
        return cls(reference, run, compare_runs(reference, run))

    @property
    def times(self) -> float:
        """How many times as many ranks the run has; more than 1."""
        return self.run.ranks / self.reference.ranks

    @property
    def first(self) -> StepComparison | None:
        """The first step with more than rounding. In float64 rounding may grow from step to step: a fault shows as a leap."""
        before = 0.0
        for step in self.steps:
            if step.first is not None and not (step.is_float64 and step.size <= _GROWTH * before):
                return step
            before = max(before, step.size)
        return None

    @property
    def titles(self) -> tuple[str, str]:
        """The run and the reference in words."""
        return ranks_of(self.run.ranks), ranks_of(self.reference.ranks)


def find_causes(case: Case) -> list[Finding]:
    """Everything that the records show, the cause to begin with first."""
    found = [finding for look in _LOOKS for finding in look(case)]
    # A global batch that grows explains all that comes later, so it is said first.
    return sorted(found, key=lambda finding: (finding.code != "global-batch-grows", _stage(finding), finding.step or 0))


def _stage(finding: Finding) -> int:
    return _ORDER.index(finding.code) if finding.code in _ORDER else len(_ORDER)


_ORDER: Final = ("global-batch-grows", "initialisation-differs-between-ranks", "initialisation-differs", "same-samples-on-all-ranks")


# Samples ---------------------------------------------------------------------------------------------------------------------------------


def _samples(case: Case) -> Iterator[Finding]:
    run, reference = case.titles
    for step in case.steps:
        seen = step.samples
        if seen.same_on_all_ranks and (not seen.same or seen.growth > 1):
            yield Finding(
                "same-samples-on-all-ranks",
                f"in step {step.step} all {run} saw the same {seen.by_rank[0]} samples",
                "give each rank its own part: hora.DataLoader, or a DistributedSampler in the DataLoader (and sampler.set_epoch(epoch) in each epoch)",
                step.step,
            )
            return
        if step.step == 1 and case.times > 1 and math.isclose(seen.growth, case.times):
            yield _growth(case, seen)
            return
        if not seen.same:
            yield _other_samples(case, step.step, seen)
            return
        if not seen.seen and "samples" in step.stages:
            yield Finding("samples-differ", f"in step {step.step} {run} took other samples than {reference}", _ORDER_ADVICE, step.step)
            return


_ORDER_ADVICE: Final = (
    "make samples and their order, random augmentation too, depend on the seed and the epoch alone, as hora.DataLoader does"
)


def _growth(case: Case, seen: samples.SampleComparison) -> Finding:
    run, reference = case.titles
    ratio = _lr_ratio(case)
    rule = f"; its learning rate is {ratio:g} times as large, as the linear scaling rule has it" if _near(ratio, case.times) else ""
    per_rank = seen.reference_rows // case.reference.ranks
    return Finding(
        "global-batch-grows",
        f"with {run} a step takes {seen.rows} samples, with {reference} {seen.reference_rows}{rule}: that is how most scripts are written and no error, "
        "but the models cannot be the same",
        f"to compare all else, keep the global batch fixed: where the script is told {per_rank} samples a rank, say {{{seen.reference_rows}/ranks}} in its "
        "arguments, and a learning rate that does not grow",
        1,
    )


def _other_samples(case: Case, step: int, seen: samples.SampleComparison) -> Finding:
    run, reference = case.titles
    apart = seen.difference
    if apart.extra and not apart.missing and apart.extra < case.run.ranks and _came_before(case, step):
        return Finding(
            "padded-with-duplicates",
            f"in step {step} {run} took {seen.rows} samples where {reference} took {seen.reference_rows}: {apart.extra} came a second time, to make the ranks' "
            "parts equal",
            "use hora.DataLoader, which pads nothing, or a data set whose size the number of ranks divides (drop_last=True leaves samples out instead)",
            step,
        )
    return Finding(
        "samples-differ",
        f"in step {step} {run} took {seen.rows} samples and {reference} {seen.reference_rows}, of which {seen.rows - apart.extra} are the same",
        _ORDER_ADVICE,
        step,
    )


def _came_before(case: Case, step: int) -> bool:
    """Whether the rows that are too many in `step` are rows that the run has seen already, in this step or an earlier one."""
    ours = samples.bags([call for number in range(1, step + 1) for record in case.run.at(number) for call in record.forwards])
    theirs = samples.bags([call for number in range(1, step + 1) for record in case.reference.at(number) for call in record.forwards])
    for stream in (stream for stream in ours if stream in theirs):
        apart = samples.difference(ours[stream].keys[0], theirs[stream].keys[0])
        if apart.repeated != apart.extra:
            return False
    return True


def _evaluation(case: Case) -> Iterator[Finding]:
    ours, theirs = ([calls for step in range(run.steps + 1) if any(calls := run.evaluations(step))] for run in (case.run, case.reference))
    run, reference = case.titles
    for number, (by_rank, before) in enumerate(zip(ours, theirs, strict=False), 1):
        seen = samples.compare_samples(by_rank, before)
        evaluating = [calls for calls in by_rank if calls]
        if not seen.seen or not seen.comparable or seen.difference.none or _each_sees_all(evaluating, before):
            continue
        apart = seen.difference
        if not apart.missing and apart.repeated == apart.extra:
            yield Finding(
                "evaluation-duplicates",
                f"evaluation {number} of {run} saw {seen.rows} samples, that of {reference} {seen.reference_rows}: {apart.extra} were counted twice",
                "go through each sample once: hora.DataLoader without shuffling pads nothing, a DistributedSampler does",
            )
            return
        if apart.missing:
            yield Finding(
                "samples-differ",
                f"evaluation {number} of {run} left out {apart.missing} of the {seen.reference_rows} samples that {reference} evaluated",
                "go through each sample once: hora.DataLoader without shuffling leaves nothing out",
            )
            return


def _each_sees_all(by_rank: Sequence[samples.Calls], reference: Sequence[samples.Calls]) -> bool:
    """Whether each rank that evaluates goes through the whole set: a waste, but no other numbers."""
    whole = [calls for calls in reference if calls][:1]
    return all(samples.compare_samples([calls], whole).difference.none for calls in by_rank)


def _epochs(case: Case) -> Iterator[Finding]:
    for run in (case.run, case.reference):
        for records in ([*run.records[rank].values(), *([run.ends[rank]] if rank in run.ends else [])] for rank in run.records):
            for record in records:
                if (epoch := record.notes.get("repeated_epoch")) is not None:
                    yield Finding(
                        "set-epoch-forgotten",
                        f"with {ranks_of(run.ranks)} a shuffling DistributedSampler was gone through twice as epoch {epoch}, in the same order",
                        "call sampler.set_epoch(epoch) at the beginning of each epoch",
                    )
                    return


def _uneven(case: Case) -> Iterator[Finding]:
    yield from uneven_steps(case.run)


def uneven_steps(run: Run) -> Iterator[Finding]:
    """Whether a rank came to the script's end while others went on."""
    counts = run.steps_by_rank
    done = {rank: counts[rank] for rank, end in run.ends.items() if not end.notes.get("failed") and rank in counts}
    others = {
        rank: count for rank, count in counts.items() if any(count > mine or (rank not in done and count >= mine) for mine in done.values())
    }
    if done and others:
        rank = min(done, key=lambda rank: done[rank])
        yield Finding(
            "uneven-steps",
            f"of {ranks_of(run.ranks)}, rank {rank} was through after {done[rank]} steps, while rank{'s' if len(others) > 1 else ''} "
            f"{some([str(other) for other in others])} went on",
            "give all ranks the same number of steps: hora.DataLoader does, and a rank without samples takes part with weight 0",
            done[rank],
        )


# What the ranks of one run do not have alike ---------------------------------------------------------------------------------------------


def _initialisation(case: Case) -> Iterator[Finding]:
    run, reference = case.titles
    if not case.steps:
        return
    own = [each for each in between_ranks(case.run.at(0), "parameter") if each.beyond_rounding]
    if own:
        yield Finding(
            "initialisation-differs-between-ranks",
            f"the {run} begin with different parameters: {some([each.name for each in own])}",
            "have rank 0's sent to all: hora.DistributedOptimizer and DistributedDataParallel do so when they are made, hora.broadcast_parameters(model) "
            "does so alone",
            0,
        )
    elif (stage := case.steps[0].stages.get("initial parameters")) is not None and stage.beyond_rounding:
        yield Finding(
            "initialisation-differs",
            f"{run} begin with other parameters than {reference}: {some([each.name for each in stage.tensors])}",
            "call torch.manual_seed with the same seed on any number of ranks, before the model is made",
            0,
        )


def _synchronisation(case: Case) -> Iterator[Finding]:
    for number in range(1, case.run.steps + 1):
        records = case.run.at(number)
        apart = [each for each in between_ranks(records, "gradient") if each.beyond_rounding]
        if apart:
            yield _unsynchronised(case, number, [each.name for each in apart], apart[0].size)
            return


def _unsynchronised(case: Case, step: int, names: list[str], size: float) -> Finding:
    run = case.titles[0]
    records = case.run.at(step)
    # A gradient that is zero everywhere is alike without anybody's doing.
    moving = {name for record in records for name, facts in record.facts("gradient").items() if norm_of(facts.sketch) > 0}
    alike = sorted(moving - set(names))
    if alike:
        return Finding(
            "parameter-not-synchronised",
            f"in step {step} the {run} have different gradients of {some(names)} (relative size {size:.2g}), while the other {len(alike)} are alike",
            "have these synchronised too: they must be in the model when it is wrapped, and be excluded nowhere",
            step,
        )
    if any(record.notes.get("bypassed") for record in records):
        return Finding(
            "wrapper-bypassed",
            f"in step {step} the {run} have different gradients (relative size {size:.2g}): the model inside DistributedDataParallel was called, not the "
            "wrapper, which then synchronises nothing",
            "call the wrapper itself, model(inputs), not model.module(inputs), wherever gradients are needed",
            step,
        )
    return Finding(
        "gradients-not-synchronised",
        f"in step {step} the {run} have different gradients of all {len(names)} parameters (relative size {size:.2g})",
        "have them averaged before the update: hora.DistributedOptimizer, DistributedDataParallel (outside no_sync in the last pass), or hora.sync_gradients",
        step,
    )


def _buffers(case: Case) -> Iterator[Finding]:
    for number in range(1, case.run.steps + 1):
        records = case.run.at(number)
        norms = [name for record in records for name in record.notes.get("batch_norms", ())]
        apart = [
            each.name for each in between_ranks(records, "buffer") if each.beyond_rounding and each.name.rpartition(".")[0] not in norms
        ]
        if apart and not any(each.beyond_rounding for each in between_ranks(records, "parameter")):
            yield Finding(
                "buffers-not-synchronised",
                f"after step {number} the {case.titles[0]} have different buffers, {some(apart)}, though their parameters are the same",
                "combine them over the ranks: hora.sync_buffers(model) before they are used, or sums over all ranks where they are updated",
                number,
            )
            return


# Gradients and updates -------------------------------------------------------------------------------------------------------------------


def _numbers(case: Case) -> Iterator[Finding]:
    """What made the gradients of the same samples different: looked for in the first step that differs by more than rounding."""
    step = case.first
    if step is None or step.step == 0 or step.first is None or step.first.stage != "gradients":
        return
    if not step.samples.same or any("initial parameters" in each.stages and each.first for each in case.steps[:1]):
        return
    for look in (_mean_of_means, _factor):
        if (finding := look(case, step.step)) is not None:
            yield finding
            return


def _factor(case: Case, step: int) -> Finding | None:
    factor = common_factor(case.reference.at(step), case.run.at(step))
    if factor is None:
        return None
    run, reference = case.titles
    if _near(factor, case.times):
        why, advice = "they are summed over the ranks, not averaged", "divide them by the number of ranks"
    elif _near(factor, 1 / case.times):
        why = "they are divided by the number of ranks once too often"
        advice = "divide once: DistributedDataParallel and hora.DistributedOptimizer average already, so leave the loss as it is"
    else:
        why, advice = "something scales them that depends on the number of ranks", "look for what scales the loss or the gradients"
    return Finding(
        "gradients-off-by-factor",
        f"in step {step} every gradient of {run} is {factor:.4g} times that of {reference}, for the same samples: {why}",
        advice,
        step,
    )


def common_factor(reference: Sequence[StepRecord], records: Sequence[StepRecord]) -> float | None:
    """The one factor by which all gradients differ; None if there is none, or it is 1."""
    theirs, ours = merged(reference, "gradient"), merged(records, "gradient")
    norms = {name: norm_of(facts.sketch) for name, facts in theirs.items()}
    largest = max(norms.values(), default=0.0)
    names = [name for name, norm in norms.items() if norm > 1e-3 * largest]
    if (
        not names
        or not math.isfinite(largest)
        or any(name not in ours or ours[name].sketch.shape != theirs[name].sketch.shape for name in names)
    ):
        return None
    a, b = (np.concatenate([tensors[name].sketch for name in names]) for tensors in (theirs, ours))
    factor = float(a @ b / (a @ a))
    tolerance = max(_FACTOR_TOLERANCE, 3 * max(ROUNDING.get(ours[name].dtype, 0.0) for name in names))
    if not math.isfinite(factor) or abs(factor - 1) <= tolerance or factor <= 0:
        return None
    apart = [norm_of(ours[name].sketch - factor * theirs[name].sketch) / (factor * norms[name]) for name in names]
    return factor if max(apart) <= tolerance else None


def _mean_of_means(case: Case, step: int) -> Finding | None:
    ours, theirs = weighted_losses(case.run.at(step)), weighted_losses(case.reference.at(step))
    if ours is None or theirs is None or len(set(ours.weights)) < 2:
        return None
    apart = abs(ours.weighted - theirs.weighted)
    scale = abs(theirs.weighted)
    if not apart <= _LOSS_TOLERANCE * scale or not abs(ours.plain - theirs.plain) > max(10 * apart, 1e-6 * scale):
        return None
    run, reference = case.titles
    return Finding(
        "mean-of-means",
        f"in step {step} the parts of {run} hold {_spread(ours.weights)} terms, and a plain mean of their mean losses is {ours.plain:.6g} where the mean over "
        f"all terms is {ours.weighted:.6g}, as with {reference}: parts with fewer terms weigh too much",
        "divide by the total over all ranks, not rank by rank: optimizer.backward(loss_sum, weight=n) of hora.DistributedOptimizer does",
        step,
    )


def _spread(weights: Sequence[int]) -> str:
    return some([str(weight) for weight in weights], 6)


@dataclass(frozen=True)
class WeightedLosses:
    """The losses of the micro-steps of a step, with how many terms each is the mean of."""

    losses: tuple[float, ...]
    weights: tuple[int, ...]

    @property
    def plain(self) -> float:
        """Their mean."""
        return sum(self.losses) / len(self.losses)

    @property
    def weighted(self) -> float:
        """The mean over all terms."""
        return sum(loss * weight for loss, weight in zip(self.losses, self.weights, strict=True)) / sum(self.weights)


def weighted_losses(records: Sequence[StepRecord]) -> WeightedLosses | None:
    """The losses of a step with their weights; None where these cannot be told."""
    losses: list[float] = []
    weights: list[int] = []
    for record in records:
        rows = [call[0].shape[0] if call else None for call in record.forwards]
        for number, micro in enumerate(record.micro_steps):
            by_rows = rows[number] if len(rows) == len(record.micro_steps) else None
            weight = micro.denominator if micro.denominator is not None else by_rows
            if weight is None or not math.isfinite(micro.loss):
                return None
            losses.append(micro.loss if weight else 0.0)
            weights.append(weight)
    return WeightedLosses(tuple(losses), tuple(weights)) if sum(weights) else None


# Hyperparameters -------------------------------------------------------------------------------------------------------------------------


def _hyperparameters(case: Case) -> Iterator[Finding]:
    growth = case.steps[1].samples.growth if len(case.steps) > 1 else 1.0
    grows = not _near(growth, 1.0)
    # Where the batch grows, epochs have fewer steps and schedules run otherwise: only the first step says something.
    for number in range(1, 2 if grows else min(case.run.steps, case.reference.steps) + 1):
        changed = changed_hyperparameters(case.reference.at(number)[0], case.run.at(number)[0])
        if changed:
            yield from _changed(case, number, changed, growth)
            return


def _changed(case: Case, step: int, changed: dict[str, tuple[object, object]], growth: float) -> Iterator[Finding]:
    run, reference = case.titles
    lr = changed.pop("lr", None)
    grows = not _near(growth, 1.0)
    if lr is not None:
        ratio = _lr_ratio(case)
        values = (
            f"the learning rate is {lr[1]:g} with {run} and {lr[0]:g} with {reference}"
            if _numeric(lr)
            else f"learning rates are {lr[1]} and {lr[0]}"
        )
        expected = case.times**2 if grows else case.times
        if _near(ratio, expected) and step == 1:
            yield Finding(
                "learning-rate-scaled",
                f"{values}, {ratio:g} times as large"
                + (", while the global batch grows by {growth:g}" if grows else " for the same global batch").format(growth=growth)
                + ": it is scaled once too often",
                "scale the learning rate with the global batch, once, or not at all where the batch stays the same",
                step,
            )
        elif not (grows and (_near(ratio, growth) or _near(ratio, math.sqrt(growth)))):
            changed["lr"] = lr
    if changed:
        words = "; ".join(f"{name} is {now!r} with {run} and {before!r} with {reference}" for name, (before, now) in changed.items())
        yield Finding(
            "hyperparameter-differs", f"in step {step} {words}", "give the optimizer the same values on any number of ranks", step
        )


def _lr_ratio(case: Case) -> float:
    """How many times the reference's learning rate the run has in the first step."""
    rates = [run.at(1)[0].groups[0].get("lr") if run.steps and run.at(1)[0].groups else None for run in (case.run, case.reference)]
    return rates[0] / rates[1] if _numeric(rates) and rates[1] else math.nan


def _numeric(values: Sequence[object]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-3)


_LOOKS: Final[tuple[Callable[[Case], Iterator[Finding]], ...]] = (
    _initialisation, _samples, _uneven, _synchronisation, _numbers, _hyperparameters, _buffers, _evaluation, _epochs,
)  # fmt: skip
