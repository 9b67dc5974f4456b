"""The course of a proof: which runs are needed, and what they show together.

One run for each number of ranks. Where they differ and their records do not say why, both runs are repeated without something: without rounding (in
float64), without dropout, without the statistics of BatchNorm. What makes the difference go away is the cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hora.diag.prove.ablation_names import BATCH_NORM, DROPOUT, FLOAT64
from hora.diag.prove.causes import Case, find_causes, uneven_steps
from hora.diag.prove.compare import StageDifference, StepComparison
from hora.diag.prove.findings import HARMLESS, Finding, ranks_of, some
from hora.diag.prove.records import Run
from hora.diag.prove.run import ProveError, RunFailed, Runner

SAME_BITS: Final = "same bits"
ROUNDED: Final = "same within rounding"
DIFFERS: Final = "differs"

_UNSURE: Final = frozenset({"initialisation-differs", "samples-differ", "unknown"})
"""Findings that a script which is not repeatable gives too."""


@dataclass(frozen=True)
class Cell:
    """One step of one number of ranks: the verdict, the largest relative difference of a tensor, and where it first lies."""

    step: int
    verdict: str
    size: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What was found for one number of ranks.

    Attributes:
        first: where it differs first by more than rounding: the step, and the stage with its tensors.
    """

    ranks: int
    cells: tuple[Cell, ...] = ()
    findings: tuple[Finding, ...] = ()
    first: tuple[int, StageDifference] | None = None

    @property
    def same_bits(self) -> bool:
        """Whether every bit of every step is the reference's, and nothing else was found."""
        return all(cell.verdict == SAME_BITS for cell in self.cells) and not self.causes

    @property
    def agrees(self) -> bool:
        """Whether nothing differs beyond rounding."""
        return all(cell.verdict != DIFFERS for cell in self.cells) and not self.causes

    @property
    def causes(self) -> tuple[Finding, ...]:
        """Findings that make a difference."""
        return tuple(finding for finding in self.findings if finding.code not in HARMLESS)


@dataclass
class Inquiry:
    """Answers, one number of ranks after the other.

    Args:
        runner: makes the runs.
        tell: told what is being done.
    """

    runner: Runner
    tell: Callable[[str], None] = lambda _: None
    _references: dict[tuple[tuple[str, ...], int], Run | None] = field(default_factory=dict)

    def reference(self) -> Run:
        """The run that the others are compared with.

        Raises:
            ProveError: the script does not run.
        """
        try:
            run = self._reference((), self.runner.request.steps)
        except RunFailed as failure:
            uneven = "".join(f"{finding.seen}; {finding.advice}.\n" for finding in uneven_steps(failure.run))
            raise ProveError(f"{uneven}{failure}") from failure
        assert run is not None
        return run

    def answer(self, ranks: int) -> Answer:
        """Runs the script on so many ranks and compares.

        Raises:
            ProveError: the script does not run.
        """
        self.tell(f"running on {ranks_of(ranks)}")
        try:
            run = self.runner.run(ranks)
        except RunFailed as failure:
            if uneven := tuple(uneven_steps(failure.run)):
                return Answer(ranks, findings=uneven)
            raise
        case = Case.of(self.reference(), run)
        if all(step.same_bits for step in case.steps):
            return conclude(ranks, case, find_causes(case), rounding=False)
        return self._explain(ranks, case)

    def _explain(self, ranks: int, case: Case) -> Answer:
        findings = self._repeatable(case, find_causes(case))
        if _serious(findings):
            return conclude(ranks, case, findings, rounding=False)
        exact_case = self._without(ranks, (FLOAT64,), self.runner.request.steps)
        if exact_case is None:
            return self._explain_without_float64(ranks, case, findings)
        if exact_case.first is None:
            return conclude(ranks, case, [*findings, _order_of_summation(case, exact_case)], rounding=True)
        in_float64 = [finding for finding in find_causes(exact_case) if finding.code not in HARMLESS]
        more = (
            in_float64
            or self._ablate(ranks, case, exact_case, (FLOAT64,))
            or self._repeatable(case, [_unknown(exact_case, "in float64 too")])
        )
        return conclude(ranks, case, [*more, *findings], rounding=False, sharp=exact_case)

    def _explain_without_float64(self, ranks: int, case: Case, findings: list[Finding]) -> Answer:
        if case.first is None:
            return conclude(ranks, case, [*findings, _order_of_summation(case, None)], rounding=True)
        more = self._ablate(ranks, case, case, ()) or self._repeatable(
            case, [_unknown(case, "and the script does not run in float64, which would tell rounding apart")]
        )
        return conclude(ranks, case, [*more, *findings], rounding=False)

    def _ablate(self, ranks: int, case: Case, sharp: Case, base: tuple[str, ...]) -> list[Finding]:
        """Repeats the runs up to the first differing step without dropout, without batch statistics, without both."""
        assert sharp.first is not None
        step = max(sharp.first.step, 1)
        records = [record for run in (sharp.run, sharp.reference) for number in range(1, step + 1) for record in run.at(number)]
        candidates = [DROPOUT] if any(record.notes.get("random_moved") for record in records) else []
        candidates += [BATCH_NORM] if any(record.notes.get("batch_norms") for record in records) else []
        for without in [(name,) for name in candidates] + ([tuple(candidates)] if len(candidates) > 1 else []):
            repeated = self._without(ranks, base + without, step)
            if repeated is not None and repeated.first is None:
                return [_shown(case, name, step, alone=len(without) == 1) for name in without]
        if candidates[:1] == [DROPOUT]:
            return [_random_numbers(case, step, "it is likely, but was not shown, that")]
        return []

    def _repeatable(self, case: Case, findings: list[Finding]) -> list[Finding]:
        """Where findings could come of a script that does something else each time: runs the reference again."""
        if not any(finding.code in _UNSURE for finding in findings):
            return findings
        step = max(case.first.step if case.first is not None else 1, 1)
        again = self._reference(("again",), step)
        repeated = None if again is None else Case.of(self.reference(), again).first
        if repeated is None or repeated.first is None:
            return findings
        return [_not_repeatable(self.reference().ranks, repeated), *(finding for finding in findings if finding.code not in _UNSURE)]

    def _without(self, ranks: int, without: tuple[str, ...], steps: int) -> Case | None:
        """Both runs without something; None if the script does not run so."""
        reference = self._reference(without, steps)
        if reference is None:
            return None
        self.tell(f"running on {ranks_of(ranks)} again, {_WORDS[without]}")
        try:
            run = self.runner.run(ranks, steps=steps, without=without)
        except RunFailed:
            return None
        return Case.of(reference, run) if FLOAT64 not in without or _all_float64(run) else None

    def _reference(self, without: tuple[str, ...], steps: int) -> Run | None:
        if (without, steps) not in self._references:
            ranks = self.runner.request.ranks[0]
            self.tell(f"running on {ranks_of(ranks)}" + (f" again{_WORDS.get(without, '') and ', ' + _WORDS[without]}" if without else ""))
            try:
                taken = () if without == ("again",) else without
                run: Run | None = self.runner.run(ranks, steps=steps, without=taken, again=without == ("again",))
            except RunFailed:
                if not without:
                    raise
                run = None
            if run is not None and FLOAT64 in without and not _all_float64(run):
                run = None
            self._references[without, steps] = run
        return self._references[without, steps]


_WORDS: Final = {
    (): "",
    ("again",): "",
    (FLOAT64,): "in float64",
    (DROPOUT,): "without dropout",
    (BATCH_NORM,): "without batch statistics",
    (DROPOUT, BATCH_NORM): "without dropout and batch statistics",
    (FLOAT64, DROPOUT): "in float64 without dropout",
    (FLOAT64, BATCH_NORM): "in float64 without batch statistics",
    (FLOAT64, DROPOUT, BATCH_NORM): "in float64 without dropout and batch statistics",
}


def conclude(ranks: int, case: Case, findings: Sequence[Finding], *, rounding: bool, sharp: Case | None = None) -> Answer:
    """The answer for one number of ranks.

    Args:
        ranks: that number.
        case: the two runs.
        findings: the cause first.
        rounding: whether all differences were shown to be rounding.
        sharp: the two runs in float64, where those tell more exactly where the difference begins.
    """
    firsts = [found for found in (case.first, sharp.first if sharp is not None else None) if found is not None]
    first = None if rounding else min(firsts, key=lambda found: found.step, default=None)
    cells = tuple(_cell(step, first) for step in case.steps[1:])
    place = None if first is None or first.first is None else (first.step, first.first)
    return Answer(ranks, cells, tuple(findings), place)


def _cell(step: StepComparison, first: StepComparison | None) -> Cell:
    if step.same_bits:
        return Cell(step.step, SAME_BITS)
    return Cell(step.step, DIFFERS if first is not None and step.step >= first.step else ROUNDED, step.size)


def _serious(findings: Sequence[Finding]) -> bool:
    return any(finding.code not in HARMLESS for finding in findings)


def _all_float64(run: Run) -> bool:
    return all(facts.dtype in ("float64", "complex128") for record in run.at(1) for facts in record.facts("gradient").values())


# Sentences of what only other runs can show ----------------------------------------------------------------------------------------------


def _order_of_summation(case: Case, in_float64: Case | None) -> Finding:
    run, reference = case.titles
    if in_float64 is not None:
        how = f"in float64 by at most {_largest(in_float64):.1e}, so it is rounding: sums taken in another order"
    else:
        how = "which is no more than rounding makes in a first step; the script does not run in float64, where rounding would show for sure"
    return Finding(
        "order-of-summation",
        f"{run} and {reference} differ by at most {_largest(case):.1e}, {how}",
        "nothing, or exact mode (--exact) for the same bits",
        next((step.step for step in case.steps if not step.same_bits), None),
    )


def _largest(case: Case) -> float:
    return max(step.size for step in case.steps)


def _shown(case: Case, name: str, step: int, *, alone: bool) -> Finding:
    together = "" if alone else " (together with the other cause below)"
    if name == DROPOUT:
        return _random_numbers(case, step, f"without dropout the runs agree{together}:")
    run, reference = case.titles
    return Finding(
        "batch-statistics-per-rank",
        f"{run} differ from {reference} in step {step}; without the statistics of BatchNorm the runs agree{together}: each rank normalises by "
        "its own samples",
        "use hora.convert_sync_batch_norm(model) (or torch.nn.SyncBatchNorm), or layers that do not look at the batch; exact mode normalises alike "
        "on any number of ranks",
        step,
    )


def _random_numbers(case: Case, step: int, how: str) -> Finding:
    run, reference = case.titles
    return Finding(
        "random-numbers-per-rank",
        f"{run} differ from {reference} in step {step}; {how} the random numbers that the model draws are others on other numbers of ranks",
        "that is what dropout on several ranks does and is usually harmless; exact mode (--exact) draws the same on any number of ranks",
        step,
    )


def _not_repeatable(ranks: int, repeated: StepComparison) -> Finding:
    assert repeated.first is not None
    names = some([each.name for each in repeated.first.tensors]) or repeated.first.words
    return Finding(
        "not-repeatable",
        f"a second run on {ranks_of(ranks)} differs from the first in {repeated.first.stage} ({names})"
        + (f" of step {repeated.step}" if repeated.step else ""),
        "seed everything that is random, on any number of ranks alike: torch.manual_seed(seed) first, generators of loaders, random and NumPy",
        repeated.step,
    )


def _unknown(case: Case, more: str) -> Finding:
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


__all__ = ["Answer", "Cell", "Inquiry", "ProveError", "conclude"]
