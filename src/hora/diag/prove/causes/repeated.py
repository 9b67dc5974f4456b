"""Causes that only further runs show: rounding, random numbers, batch statistics, a script that is not repeatable; and what is left unexplained."""

from hora.diag.prove.ablation_names import DROPOUT
from hora.diag.prove.causes.case import Case
from hora.diag.prove.compare import StepComparison
from hora.diag.prove.findings import Finding, ranks_of, some


def order_of_summation(case: Case, in_float64: Case | None) -> Finding:
    """Rounding: shown by what is left of the differences in float64, or (None) likely by their size."""
    run, reference = case.titles
    if in_float64 is not None:
        how = f"in float64 by at most {_largest(in_float64):.1e}, so it is rounding: sums taken in another order"
    else:
        how = "no more than rounding makes in a first step and may grow to; the script does not run in float64, where rounding would show for sure"
    return Finding(
        "order-of-summation",
        f"{run} and {reference} differ by at most {_largest(case):.1e}, {how}",
        "nothing, or exact mode (--exact) for the same bits",
        next((step.step for step in case.steps if not step.same_bits), None),
    )


def _largest(case: Case) -> float:
    return max(step.size for step in case.steps)


def shown(case: Case, name: str, step: int, *, alone: bool) -> Finding:
    """What was taken out (`DROPOUT` or `BATCH_NORM`) is the cause, alone or together with the other."""
    together = "" if alone else " (together with the other cause below)"
    if name == DROPOUT:
        return random_numbers(case, step, f"without dropout the runs agree{together}:")
    run, reference = case.titles
    return Finding(
        "batch-statistics-per-rank",
        f"{run} differ from {reference} in step {step}; without the statistics of BatchNorm the runs agree{together}: each rank normalises by "
        "its own samples",
        "use hora.convert_sync_batch_norm(model) (or torch.nn.SyncBatchNorm), or layers that do not look at the batch; exact mode normalises alike "
        "on any number of ranks",
        step,
    )


def random_numbers(case: Case, step: int, how: str) -> Finding:
    """The random numbers of forward are the cause; `how` says how that is known."""
    run, reference = case.titles
    return Finding(
        "random-numbers-per-rank",
        f"{run} differ from {reference} in step {step}; {how} the random numbers that the model draws are others on other numbers of ranks",
        "that is what dropout on several ranks does and is usually harmless; exact mode (--exact) draws the same on any number of ranks",
        step,
    )


def not_repeatable(ranks: int, repeated: StepComparison) -> Finding:
    """A second run of the reference differs from the first."""
    assert repeated.first is not None
    names = some([each.name for each in repeated.first.tensors]) or repeated.first.words
    return Finding(
        "not-repeatable",
        f"a second run on {ranks_of(ranks)} differs from the first in {repeated.first.stage} ({names})"
        + (f" of step {repeated.step}" if repeated.step else ""),
        "seed everything that is random, on any number of ranks alike: torch.manual_seed(seed) first, generators of loaders, random and NumPy",
        repeated.step,
    )


def unknown(case: Case, more: str) -> Finding:
    """Nothing explains the difference; what is the same is said."""
    first = case.first
    assert first is not None
    assert first.first is not None
    run, reference = case.titles
    same = [
        stage
        for stage in ("initial parameters", "samples", "hyperparameters")
        if not any(stage in step.stages for step in case.steps[: first.step + 1])
    ]
    worst = ", ".join(f"{each.name} ({each.size:.2g})" for each in first.first.tensors[:3])
    return Finding(
        "unknown",
        f"{first.first.stage} of {run} are not those of {reference} in step {first.step}: {worst or first.first.words}, {more}; the same are "
        f"{', '.join(same) or 'none of initial parameters, samples, hyperparameters'}",
        "look for what depends on the rank or the number of ranks in the loss and what comes after backward",
        first.step,
    )
