"""A study as tables and sentences, and as a picture and a page. Loads rich, and matplotlib when it draws."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hora.diag.bench.rows import commit, machine, versions
from hora.diag.output import new_figure, svg_of, write_png
from hora.diag.page import Page, write_page
from hora.diag.scale.point import efficiency, speed_up
from hora.diag.scale.result import Result

_FEW_STEPS = 20
_PREDICTED = "predicted, if additional ranks are like these and as close"
_SHOWN = {"speed-up": speed_up, "efficiency": efficiency}

_Cells = tuple[tuple[str, ...], list[list[str]]]
"""The names of columns, and the rows of a table."""


def show(console: Console, result: Result) -> None:
    """Prints everything."""
    console.print(_as_table(_title(result), *_measured(result)))
    for sentence in sentences(result):
        console.print(sentence, highlight=False, soft_wrap=True)
    if result.predictions:
        console.print(_as_table(_PREDICTED, *_predicted(result)))


def _title(result: Result) -> str:
    batch = "the same global batch" if result.kind == "strong" else "the same batch per rank"
    return f"{result.name}: {result.kind} scaling ({batch})"


def _as_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def sentences(result: Result) -> list[str]:
    """What is said of the study."""
    found = []
    if (steps := min(point.steps for point in result.points)) < _FEW_STEPS:
        found.append(f"A run had {steps} timed step{'s' if steps != 1 else ''}: too few to judge by. Have the script make a few dozen.")
    found.append(result.limit)
    if len(result.points) > 1:
        found.append(result.points[-1].advice)
    if result.predictions and not result.wires:
        found.append(
            "Nothing is known of how sums grow with the ranks, so they are taken to last as long as on the largest measured number."
        )
    found += [f"sums modelled as a {wire.name}: within {wire.error:.0%} of the measured times" for wire in result.wires]
    if result.tried is not None:
        found.append(
            f"{result.tried.ranks} ranks, predicted from fewer: {1e3 * result.tried.step_s:.4g} ms ({1e3 * result.tried.low_s:.3g} to "
            f"{1e3 * result.tried.high_s:.3g}); measured: {1e3 * result.points[-1].median_s:.4g} ms ({result.tried_error:+.1%})"
        )
    return found


def _measured(result: Result) -> _Cells:
    base = result.points[0]
    columns = ("ranks", "step ms", "runs", "speed-up", "efficiency", "exposed sums", "data wait", "late ranks")
    rows = [
        [
            str(point.ranks),
            f"{1e3 * point.median_s:.4g}",
            " ".join(f"{1e3 * step_s:.3g}" for step_s in point.step_s),
            f"{speed_up(result.kind, base, point.ranks, point.median_s):.2f}",
            f"{efficiency(result.kind, base, point.ranks, point.median_s):.0%}",
            f"{point.parts_s['communication'] / point.median_s:.0%}",
            f"{point.parts_s['data'] / point.median_s:.0%}",
            f"{point.late:.0%}",
        ]
        for point in result.points
    ]
    return columns, rows


def _predicted(result: Result) -> _Cells:
    base, rows = result.points[0], []
    for prediction in result.predictions:
        best, worst = (f"{efficiency(result.kind, base, prediction.ranks, step_s):.0%}" for step_s in (prediction.low_s, prediction.high_s))
        rows.append(
            [
                str(prediction.ranks),
                f"{1e3 * prediction.step_s:.4g}",
                f"{1e3 * prediction.low_s:.3g} and {1e3 * prediction.high_s:.3g}",
                f"{speed_up(result.kind, base, prediction.ranks, prediction.step_s):.4g}",
                f"{efficiency(result.kind, base, prediction.ranks, prediction.step_s):.0%} ({worst} to {best})",
            ]
        )
    return ("ranks", "step ms", "between", "speed-up", "efficiency"), rows


def draw(result: Result, picture: Path) -> None:
    """Draws speed-up and efficiency over the number of ranks into a PNG, which appears whole."""
    figure = new_figure(11, 4.5)
    for index, what in enumerate(_SHOWN):
        _draw(figure.add_subplot(1, len(_SHOWN), index + 1), result, what)
    write_png(figure, picture)


def write_html(result: Result, words: Sequence[str], path: Path) -> None:
    """Writes all that is said and drawn as a page, which appears whole."""
    page = Page(_title(result))
    for what in _SHOWN:
        figure = new_figure(5, 4)
        _draw(figure.add_subplot(1, 1, 1), result, what)
        page.figure(what.capitalize(), svg_of(figure), "Lines: fastest and slowest run.")
    page.table("In numbers", *_measured(result))
    page.list("Findings", sentences(result))
    if result.predictions:
        page.table(_PREDICTED.capitalize(), *_predicted(result))
    page.origin(machine(), versions(), commit(), shlex.join(words))
    write_page(page, path)


def _draw(axes: Any, result: Result, what: str) -> None:
    base, function = result.points[0], _SHOWN[what]
    axes.set(xlabel="ranks", ylabel=what, title=f"{result.name}, {result.kind} scaling", xscale="log")
    ranks = [point.ranks for point in result.points]
    values = [function(result.kind, base, point.ranks, point.median_s) for point in result.points]
    around = [
        [
            abs(value - function(result.kind, base, point.ranks, end(point.step_s)))
            for point, value in zip(result.points, values, strict=True)
        ]
        for end in (max, min)
    ]
    axes.errorbar(ranks, values, yerr=around, marker="o", capsize=3, label="measured")
    if result.predictions:
        further = [prediction.ranks for prediction in result.predictions]
        low, middle, high = (
            [function(result.kind, base, prediction.ranks, step_s) for prediction, step_s in zip(result.predictions, steps_s, strict=True)]
            for steps_s in zip(*((p.high_s, p.step_s, p.low_s) for p in result.predictions), strict=True)
        )
        axes.plot([ranks[-1], *further], [values[-1], *middle], linestyle="--", label="predicted")
        axes.fill_between(further, low, high, alpha=0.2)
        ranks = ranks + further
    axes.plot(ranks, [n if what == "speed-up" else 1.0 for n in ranks], color="grey", linewidth=1, label="ideal")
    axes.set_xticks(ranks, list(map(str, ranks)))
    axes.minorticks_off()
    if what == "speed-up":
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
