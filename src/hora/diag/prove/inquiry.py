"""The course of a proof: which runs are needed, and what they show together.

One run for each number of ranks. Where they differ and their records do not say why, both runs are repeated without something: without rounding (in
float64), without dropout, without the statistics of BatchNorm. What makes the difference go away is the cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hora.diag.prove.ablation_names import BATCH_NORM, DROPOUT, FLOAT64
from hora.diag.prove.answers import Answer, conclude
from hora.diag.prove.causes import Case, find_causes, uneven_steps
from hora.diag.prove.causes.repeated import not_repeatable, order_of_summation, random_numbers, shown, unknown
from hora.diag.prove.compare import StepComparison
from hora.diag.prove.findings import HARMLESS, Finding, ranks_of
from hora.diag.prove.records import Run
from hora.diag.prove.run import ProveError, RunFailed, Runner

_UNSURE: Final = frozenset({"initialisation-differs", "samples-differ", "unknown"})
"""Findings that a script which is not repeatable gives too."""

_FROM_ITS_STEP_ON: Final = frozenset({"padded-with-duplicates", "samples-differ"})
"""Findings whose step is the first to see other samples, so that what differs before has another cause."""


@dataclass
class Inquiry:
    """Answers, one number of ranks after the other.

    Args:
        runner: makes the runs.
        tell: told what is being done.
    """

    runner: Runner
    tell: Callable[[str], None] = lambda _: None
    _first: Run | None = None
    _second: Run | None = None
    _references: dict[tuple[tuple[str, ...], int], Run | None] = field(default_factory=dict)

    def reference(self) -> Run:
        """The run that the others are compared with.

        Raises:
            ProveError: the script does not run.
        """
        try:
            if self._first is None:
                ranks = self.runner.request.ranks[0]
                self.tell(f"running on {ranks_of(ranks)}")
                self._first = self.runner.run(ranks)
        except RunFailed as failure:
            uneven = "".join(f"{finding.seen}; {finding.advice}.\n" for finding in uneven_steps(failure.run))
            raise ProveError(f"{uneven}{failure}") from failure
        return self._first

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
        if _explained(findings, case.first):
            return conclude(ranks, case, findings, rounding=False)
        exact_case = self._without(ranks, (FLOAT64,), self.runner.request.steps)
        if exact_case is None:
            return self._explain_without_float64(ranks, case, findings)
        if exact_case.first is None:
            return conclude(ranks, case, [*findings, order_of_summation(case, exact_case)], rounding=True)
        in_float64 = [finding for finding in find_causes(exact_case) if _explained([finding], exact_case.first)]
        more = (
            in_float64
            or self._ablate(ranks, case, exact_case, (FLOAT64,))
            or self._repeatable(exact_case, [unknown(exact_case, "in float64 too")])
        )
        return conclude(ranks, case, [*more, *findings], rounding=False, sharp=exact_case)

    def _explain_without_float64(self, ranks: int, case: Case, findings: list[Finding]) -> Answer:
        if _explained(findings, case.first_leap):
            return conclude(ranks, case, findings, rounding=False)
        if case.first_leap is None:
            return conclude(ranks, case, [*findings, order_of_summation(case, None)], rounding=True)
        more = self._ablate(ranks, case, case, ()) or self._repeatable(
            case, [unknown(case, "and the script does not run in float64, which would tell rounding apart")]
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
                return [shown(case, name, step, alone=len(without) == 1) for name in without]
        if candidates[:1] == [DROPOUT]:
            return [random_numbers(case, step, "it is likely, but was not shown, that")]
        return []

    def _repeatable(self, case: Case, findings: list[Finding]) -> list[Finding]:
        """Where findings could come of a script that does something else each time: runs the reference again."""
        if not any(finding.code in _UNSURE for finding in findings):
            return findings
        again = self._again(max(case.first.step if case.first is not None else 1, 1))
        repeated = None if again is None else Case.of(self.reference(), again).first
        if repeated is None:
            return findings
        return [not_repeatable(self.reference().ranks, repeated), *(finding for finding in findings if finding.code not in _UNSURE)]

    def _again(self, steps: int) -> Run | None:
        """A second run of the reference; one will do, if it has as many steps."""
        if self._second is None or self._second.steps < steps:
            ranks = self.runner.request.ranks[0]
            self.tell(f"running on {ranks_of(ranks)} again")
            self._second = self._attempt(ranks, steps=steps, again=True)
        return self._second

    def _without(self, ranks: int, without: tuple[str, ...], steps: int) -> Case | None:
        """Both runs without something; None if the script does not run so."""
        key = without, steps
        if key not in self._references:
            self._references[key] = self._run_without(self.runner.request.ranks[0], without, steps)
        reference = self._references[key]
        run = None if reference is None else self._run_without(ranks, without, steps)
        return None if reference is None or run is None else Case.of(reference, run)

    def _run_without(self, ranks: int, without: tuple[str, ...], steps: int) -> Run | None:
        self.tell(f"running on {ranks_of(ranks)} again, {in_words(without)}")
        run = self._attempt(ranks, steps=steps, without=without)
        return None if run is None or (FLOAT64 in without and not _all_float64(run)) else run

    def _attempt(self, ranks: int, **how: Any) -> Run | None:
        try:
            return self.runner.run(ranks, **how)
        except RunFailed:
            return None


def in_words(without: Sequence[str]) -> str:
    """What is taken out: `in float64 without dropout`."""
    layers = [_LAYERS[name] for name in without if name in _LAYERS]
    return " ".join((["in float64"] if FLOAT64 in without else []) + ([f"without {' and '.join(layers)}"] if layers else []))


_LAYERS: Final = {DROPOUT: "dropout", BATCH_NORM: "batch statistics"}


def _explained(findings: Sequence[Finding], first: StepComparison | None) -> bool:
    """Whether something among `findings` explains the difference that is the first; None: any that there is."""
    trained = first is not None and first.first is not None and first.first.stage != "evaluation"
    return any(
        finding.code not in HARMLESS
        and not (trained and finding.of_evaluation)
        and not (first is not None and finding.code in _FROM_ITS_STEP_ON and finding.step is not None and finding.step > first.step)
        for finding in findings
    )


def _all_float64(run: Run) -> bool:
    return all(facts.dtype in ("float64", "complex128") for record in run.at(1) for facts in record.facts("gradient").values())
