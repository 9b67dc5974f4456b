"""Prints a proof: one table, and what was found; and the same as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hora.diag.prove.answers import DIFFERS, ROUNDED, Answer, Cell
from hora.diag.prove.compare import StageDifference
from hora.diag.prove.findings import Finding, ranks_of
from hora.diag.prove.request import Request, describe

_STYLES = {DIFFERS: "red", ROUNDED: "", "same bits": "green"}


def exit_code(request: Request, answers: Sequence[Answer]) -> int:
    """0 if no number of ranks differs beyond rounding (with `exact`: in any bit), else 1."""
    return 0 if all(answer.same_bits if request.exact else answer.agrees for answer in answers) else 1


def show(console: Console, request: Request, answers: Sequence[Answer]) -> None:
    """Prints everything."""
    console.print(escape(f"{describe(request.words)}: compared with {ranks_of(request.ranks[0])}"), soft_wrap=True)
    if any(answer.cells for answer in answers):
        console.print(table(answers))
    told: dict[tuple[str, ...], int] = {}
    for answer in answers:
        codes = tuple(finding.code for finding in answer.findings)
        if codes and codes in told:
            console.print(f"\n[bold]{ranks_of(answer.ranks)}[/]: as with {ranks_of(told[codes])}{escape(place_of(answer))}", soft_wrap=True)
            continue
        told[codes] = answer.ranks
        console.print(f"\n[bold]{ranks_of(answer.ranks)}[/]: {escape(headline(answer) + place_of(answer))}", soft_wrap=True)
        for number, finding in enumerate(answer.findings):
            _show_finding(console, finding, first=number == 0)
    console.print(f"\n{escape(summary(request, answers))}", soft_wrap=True)


def table(answers: Sequence[Answer]) -> Table:
    """Steps down, numbers of ranks across."""
    shown = Table("step", *(ranks_of(answer.ranks) for answer in answers))
    shown.columns[0].justify = "right"
    rows = max(len(answer.cells) for answer in answers)
    for index in range(rows):
        cells = [answer.cells[index] if index < len(answer.cells) else None for answer in answers]
        shown.add_row(
            str(index + 1), *(Text("" if cell is None else words(cell), "" if cell is None else _STYLES[cell.verdict]) for cell in cells)
        )
    return shown


def words(cell: Cell) -> str:
    """A cell of the table."""
    if cell.size == 0.0:
        return cell.verdict
    return f"{cell.verdict} ({cell.size:.1e})" if math.isfinite(cell.size) else f"{cell.verdict} (not finite)"


def headline(answer: Answer) -> str:
    """What became of one number of ranks, in a few words."""
    if answer.same_bits:
        return "the same bits in every step"
    if answer.agrees:
        return "the same within rounding in every step"
    return "differs"


def place_of(answer: Answer) -> str:
    """Where the difference begins."""
    if answer.first is None:
        return ""
    step, stage = answer.first
    where = f"first in step {step}" if step else "before the first step"
    return f", {where}, in {_name(stage)}"


def _name(stage: StageDifference) -> str:
    if not stage.tensors:
        return f"{stage.stage} ({stage.words})" if stage.words else stage.stage
    worst = stage.tensors[0]
    others = len(stage.tensors) - 1
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return f"{stage.stage}: {worst.name} by {worst.size:.1e} of its size{more}"


def _show_finding(console: Console, finding: Finding, *, first: bool) -> None:
    console.print(f"  [bold]{finding.code}[/]{'' if first else ' (also)'}: {escape(finding.seen)}.", soft_wrap=True)
    console.print(f"    What to do: {escape(finding.advice)}.", soft_wrap=True)


def summary(request: Request, answers: Sequence[Answer]) -> str:
    """The last line."""
    bits = [answer for answer in answers if answer.same_bits]
    differing = [str(answer.ranks) for answer in answers if not answer.agrees]
    steps = min((len(answer.cells) for answer in answers if answer.cells), default=0)
    if differing:
        against = f"{', '.join(differing)} against {request.ranks[0]}"
        return f"The number of ranks changes what is trained or measured: {against}. Everything recorded is in {request.directory}."
    if len(bits) == len(answers):
        return f"The number of ranks does not change a bit in {steps} steps."
    if request.exact:
        return f"Within rounding the number of ranks does not change the model in {steps} steps, but --exact asks for the same bits."
    return f"The number of ranks does not change the model in {steps} steps, but for rounding."


def as_json(request: Request, answers: Sequence[Answer]) -> str:
    """Everything that is printed."""
    document: dict[str, Any] = {
        "words": list(request.words),
        "ranks": list(request.ranks),
        "steps": request.steps,
        "exact": request.exact,
        "exit_code": exit_code(request, answers),
        "summary": summary(request, answers),
        "answers": [_answer(answer) for answer in answers],
    }
    return json.dumps(document, indent=1) + "\n"


def _answer(answer: Answer) -> dict[str, Any]:
    first = None
    if answer.first is not None:
        step, stage = answer.first
        tensors = [{"name": each.name, "size": _number(each.size)} for each in stage.tensors]
        first = {"step": step, "stage": stage.stage, "tensors": tensors, "words": stage.words}
    return {
        "ranks": answer.ranks,
        "headline": headline(answer),
        "first": first,
        "findings": [asdict(finding) for finding in answer.findings],
        "steps": [{"step": cell.step, "verdict": cell.verdict, "size": _number(cell.size)} for cell in answer.cells],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
