"""Causes in the samples that were seen, and in how many steps they were dealt to."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from hora.diag.prove import samples
from hora.diag.prove.causes.case import Case, near
from hora.diag.prove.findings import Finding, ranks_of, some
from hora.diag.prove.records import Run


def other_samples(case: Case) -> Iterator[Finding]:
    """The first step that saw other samples than the reference."""
    run, reference = case.titles
    for step in case.steps:
        seen = step.samples
        if seen.same_on_all_ranks and (not seen.same or seen.growth > 1):
            yield Finding(
                "same-samples-on-all-ranks",
                f"all {run} saw the same {seen.by_rank[0]} samples in step {step.step}",
                "give each rank its own part: hora.DataLoader, or a DistributedSampler with sampler.set_epoch(epoch) in each epoch",
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
            yield Finding("samples-differ", f"{run} took other samples than {reference} in step {step.step}", _ORDER_ADVICE, step.step)
            return


_ORDER_ADVICE: Final = (
    "make samples and their order, random augmentation too, depend on the seed and the epoch alone, as hora.DataLoader does"
)


def _growth(case: Case, seen: samples.SampleComparison) -> Finding:
    run, reference = case.titles
    ratio = case.lr_ratio
    rule = f"; its learning rate is {ratio:g} times as large, as the linear scaling rule has it" if near(ratio, case.times) else ""
    per_rank = seen.reference_rows // case.reference.ranks
    return Finding(
        "global-batch-grows",
        f"with {run} a step takes {seen.rows} samples, with {reference} {seen.reference_rows}{rule}: most scripts are written so and it is no error, "
        "but the models cannot be the same",
        f"to compare all else, keep the global batch fixed: where the script is told {per_rank} samples a rank, give it "
        f"{{{seen.reference_rows}/ranks}} (as in --batch-size {{{seen.reference_rows}/ranks}}), and a learning rate that does not grow",
        1,
    )


def _other_samples(case: Case, step: int, seen: samples.SampleComparison) -> Finding:
    run, reference = case.titles
    apart = seen.difference
    if apart.extra and not apart.missing and apart.extra < case.run.ranks and _came_before(case, step):
        return Finding(
            "padded-with-duplicates",
            f"{run} took {seen.rows} samples in step {step} where {reference} took {seen.reference_rows}: {apart.extra} came a second time, to make "
            "the ranks' parts equal",
            "use hora.DataLoader, which pads nothing, or a data set whose size the number of ranks divides (drop_last=True leaves some out)",
            step,
        )
    return Finding(
        "samples-differ",
        f"{run} took {seen.rows} samples in step {step}, {reference} {seen.reference_rows}, of which {seen.rows - apart.extra} are the same",
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


def evaluation(case: Case) -> Iterator[Finding]:
    """The first evaluation that saw samples twice, or not at all."""
    ours, theirs = ([calls for step in range(run.steps + 1) if any(calls := run.evaluations(step))] for run in (case.run, case.reference))
    run, reference = case.titles
    # What is evaluated in a step of training (by a teacher, say) is another where the step has other samples.
    same_training = all(step.samples.same and not step.samples.growth > 1 for step in case.steps)
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
                of_evaluation=True,
            )
            return
        if apart.missing and same_training:
            yield Finding(
                "samples-differ",
                f"evaluation {number} of {run} left out {apart.missing} of the {seen.reference_rows} samples that {reference} evaluated",
                "go through each sample once: hora.DataLoader without shuffling leaves nothing out",
                of_evaluation=True,
            )
            return


def _each_sees_all(by_rank: Sequence[samples.Calls], reference: Sequence[samples.Calls]) -> bool:
    """Whether each rank that evaluates goes through the whole set: a waste, but no other numbers."""
    whole = [calls for calls in reference if calls][:1]
    return all(samples.compare_samples([calls], whole).difference.none for calls in by_rank)


def repeated_epochs(case: Case) -> Iterator[Finding]:
    """Whether `set_epoch` was forgotten, in either run."""
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


def uneven(case: Case) -> Iterator[Finding]:
    """Whether the ranks made different numbers of steps."""
    yield from uneven_steps(case.run)


def uneven_steps(run: Run) -> Iterator[Finding]:
    """Whether a rank came to the script's end while others went on."""
    counts = run.steps_by_rank
    done = {rank: counts[rank] for rank, end in run.ends.items() if not end.notes.get("failed") and rank in counts}
    others = {
        rank: count
        for rank, count in counts.items()
        if any(count > mine or (rank not in done and run.begun.get(rank, 0) > mine) for mine in done.values())
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
