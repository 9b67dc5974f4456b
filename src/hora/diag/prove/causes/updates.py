"""Causes in gradients of the same samples, and in the hyperparameters of the update."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hora.diag.prove.causes.case import Case, near, numeric
from hora.diag.prove.compare import ROUNDING, changed_hyperparameters, merged, norm_of
from hora.diag.prove.findings import Finding, some
from hora.diag.prove.records import StepRecord

_FACTOR_TOLERANCE: Final = 1e-3
_LOSS_TOLERANCE: Final = 1e-4


def gradients(case: Case) -> Iterator[Finding]:
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
    if near(factor, case.times):
        why, advice = "they are summed over the ranks, not averaged", "divide them by the number of ranks"
    elif near(factor, 1 / case.times):
        why = "they are divided by the number of ranks once too often"
        advice = "divide once: DistributedDataParallel and hora.DistributedOptimizer average already, so leave the loss as it is"
    else:
        why, advice = "something scales them that depends on the number of ranks", "look for what scales the loss or the gradients"
    return Finding(
        "gradients-off-by-factor",
        f"every gradient of {run} in step {step} is {factor:.4g} times that of {reference}, for the same samples: {why}",
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
        f"the parts of {run} hold in step {step} {_spread(ours.weights)} terms, and a plain mean of their mean losses is {ours.plain:.6g} where "
        f"the mean over all terms is {ours.weighted:.6g}, as with {reference}: parts with fewer terms weigh too much",
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


def hyperparameters(case: Case) -> Iterator[Finding]:
    """The first step in which a parameter group has other values."""
    growth = case.steps[1].samples.growth if len(case.steps) > 1 else 1.0
    grows = not near(growth, 1.0)
    # Where the batch grows, epochs have fewer steps and schedules run otherwise: only the first step says something.
    for number in range(1, 2 if grows else min(case.run.steps, case.reference.steps) + 1):
        changed = changed_hyperparameters(case.reference.at(number)[0], case.run.at(number)[0])
        if changed:
            yield from _changed(case, number, changed, growth)
            return
        if (finding := _apart(case, number)) is not None:
            yield finding
            return


def _apart(case: Case, step: int) -> Finding | None:
    """Whether the ranks of the run have other values than its first rank."""
    first, *others = case.run.at(step)
    for record in others:
        if len(record.groups) == len(first.groups) and (changed := changed_hyperparameters(first, record)):
            words = "; ".join(
                f"{name} is {now!r} on rank {record.rank} and {before!r} on rank {first.rank}" for name, (before, now) in changed.items()
            )
            return Finding(
                "hyperparameter-differs",
                f"with {case.titles[0]}, {words} in step {step}",
                "give the optimizer the same values on all ranks",
                step,
            )
    return None


def _changed(case: Case, step: int, changed: dict[str, tuple[object, object]], growth: float) -> Iterator[Finding]:
    run, reference = case.titles
    lr = changed.pop("lr", None)
    grows = not near(growth, 1.0)
    if lr is not None:
        ratio = case.lr_ratio
        values = (
            f"the learning rate is {lr[1]:g} with {run} and {lr[0]:g} with {reference}"
            if numeric(lr)
            else f"learning rates are {lr[1]} and {lr[0]}"
        )
        expected = case.times**2 if grows else case.times
        if near(ratio, expected) and step == 1:
            yield Finding(
                "learning-rate-scaled",
                f"{values}, {ratio:g} times as large"
                + (", while the global batch grows by {growth:g}" if grows else " for the same global batch").format(growth=growth)
                + ": it is scaled once too often",
                "scale the learning rate with the global batch, once, or not at all where the batch stays the same",
                step,
            )
        elif not (grows and (near(ratio, growth) or near(ratio, math.sqrt(growth)))):
            changed["lr"] = lr
    if changed:
        words = "; ".join(f"{name} is {now!r} with {run} and {before!r} with {reference}" for name, (before, now) in changed.items())
        yield Finding(
            "hyperparameter-differs", f"{words}, in step {step}", "give the optimizer the same values on any number of ranks", step
        )
