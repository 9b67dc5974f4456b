"""A study as tables and sentences, and as a picture. Loads rich, and matplotlib when it draws."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from hora.diag.output import new_figure, write_png
from hora.diag.scale.point import efficiency, speed_up
from hora.diag.scale.result import Result

_FEW_STEPS = 20


def show(console: Console, result: Result) -> None:
    """Prints everything."""
    base = result.points[0]
    batch = "the global batch stays" if result.kind == "strong" else "the batch of a rank stays"
    table = Table(title=f"{result.name}: {result.kind} scaling ({batch})")
    for column in ("ranks", "step ms", "runs", "speed-up", "efficiency", "exposed sums", "data wait", "late ranks"):
        table.add_column(column, justify="right")
    for point in result.points:
        table.add_row(
            str(point.ranks),
            f"{1e3 * point.median_s:.4g}",
            " ".join(f"{1e3 * step_s:.3g}" for step_s in point.step_s),
            f"{speed_up(result.kind, base, point.ranks, point.median_s):.2f}",
            f"{efficiency(result.kind, base, point.ranks, point.median_s):.0%}",
            f"{point.parts_s['communication'] / point.median_s:.0%}",
            f"{point.parts_s['data'] / point.median_s:.0%}",
            f"{point.late:.0%}",
        )
    console.print(table)
    if (steps := min(point.steps for point in result.points)) < _FEW_STEPS:
        console.print(
            f"A run had {steps} steps that count: too few to judge by. Have the script make some dozens.", highlight=False, soft_wrap=True
        )
    console.print(result.limit, highlight=False, soft_wrap=True)
    if len(result.points) > 1:
        console.print(result.points[-1].advice, highlight=False, soft_wrap=True)
    for wire in result.wires:
        console.print(f"sums as a {wire.name}: within {wire.error:.0%} of what was measured", highlight=False)
    if result.tried is not None:
        console.print(
            f"{result.tried.ranks} ranks, predicted from fewer: {1e3 * result.tried.step_s:.4g} ms ({1e3 * result.tried.low_s:.3g} to "
            f"{1e3 * result.tried.high_s:.3g}); measured: {1e3 * result.points[-1].median_s:.4g} ms ({result.tried_error:+.1%})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if result.predictions:
        console.print(_predicted(result))


def _predicted(result: Result) -> Table:
    base = result.points[0]
    table = Table(title="predicted, if further ranks are like these and as near")
    for column in ("ranks", "step ms", "between", "speed-up", "efficiency"):
        table.add_column(column, justify="right")
    for prediction in result.predictions:
        best, worst = (f"{efficiency(result.kind, base, prediction.ranks, step_s):.0%}" for step_s in (prediction.low_s, prediction.high_s))
        table.add_row(
            str(prediction.ranks),
            f"{1e3 * prediction.step_s:.4g}",
            f"{1e3 * prediction.low_s:.3g} and {1e3 * prediction.high_s:.3g}",
            f"{speed_up(result.kind, base, prediction.ranks, prediction.step_s):.4g}",
            f"{efficiency(result.kind, base, prediction.ranks, prediction.step_s):.0%} ({worst} to {best})",
        )
    return table


def draw(result: Result, picture: Path) -> None:
    """Draws speed-up and efficiency over the number of ranks into a PNG, which appears whole."""
    base = result.points[0]
    figure = new_figure(11, 4.5)
    for index, (what, function) in enumerate((("speed-up", speed_up), ("efficiency", efficiency))):
        axes = figure.add_subplot(1, 2, index + 1, xlabel="ranks", ylabel=what, title=f"{result.name}, {result.kind} scaling", xscale="log")
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
                [
                    function(result.kind, base, prediction.ranks, step_s)
                    for prediction, step_s in zip(result.predictions, steps_s, strict=True)
                ]
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
    write_png(figure, picture)
