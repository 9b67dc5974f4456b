"""Causes in what the ranks of one run do not have alike."""

from collections.abc import Iterator

from hora.diag.prove.causes.case import Case
from hora.diag.prove.compare import between_ranks, norm_of
from hora.diag.prove.findings import Finding, some


def initialisation(case: Case) -> Iterator[Finding]:
    """Parameters before the first step: alike on all ranks, and as in the reference?"""
    run, reference = case.titles
    if not case.steps:
        return
    own = [each for each in between_ranks(case.run.at(0), "parameter") if each.beyond_rounding]
    if own:
        yield Finding(
            "initialisation-differs-between-ranks",
            f"the {run} begin with different parameters: {some([each.name for each in own])}",
            "have rank 0's sent to all: hora.DistributedOptimizer and DistributedDataParallel do so when they are made, "
            "hora.broadcast_parameters(model) does so alone",
            0,
        )
    elif (stage := case.steps[0].stages.get("initial parameters")) is not None and stage.beyond_rounding:
        yield Finding(
            "initialisation-differs",
            f"{run} begin with other parameters than {reference}: {some([each.name for each in stage.tensors])}",
            "call torch.manual_seed with the same seed on any number of ranks, before the model is made",
            0,
        )


def synchronisation(case: Case) -> Iterator[Finding]:
    """The first step in which ranks have different gradients."""
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
            f"the {run} have different gradients in step {step} of {some(names)} (relative size {size:.2g}), while the other {len(alike)} are alike",
            "have these synchronised too: they must be in the model when it is wrapped, and be excluded nowhere",
            step,
        )
    if any(record.notes.get("bypassed") for record in records):
        return Finding(
            "wrapper-bypassed",
            f"the {run} have different gradients in step {step} (relative size {size:.2g}): the model inside DistributedDataParallel was "
            "called, not the wrapper, which then synchronises nothing",
            "call the wrapper itself, model(inputs), not model.module(inputs), wherever gradients are needed",
            step,
        )
    return Finding(
        "gradients-not-synchronised",
        f"the {run} have different gradients in step {step} of all {len(names)} parameters (relative size {size:.2g})",
        "have them averaged first: hora.DistributedOptimizer, DistributedDataParallel (no_sync but in the last pass), hora.sync_gradients",
        step,
    )


def buffers(case: Case) -> Iterator[Finding]:
    """The first step after which ranks have different buffers but the same parameters."""
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
