"""A comparison as a table, as rows for a file, as pictures, and as a page. Loads rich when it prints, matplotlib when it draws."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hora.compare.kinds import Kind
from hora.compare.request import MEANS, VARIANTS, Request
from hora.compare.result import Outcome, ranks_of
from hora.diag.bench.rows import commit, machine, versions
from hora.diag.output import new_figure, svg_of, write_png
from hora.diag.page import Page, write_page

_COLUMNS: Final = ("variant", "time s", "min..max", "ms a step", "x one process", "efficiency", "waiting", "loss")
_LEAST_RUNS: Final = 3


def cells(outcomes: Sequence[Outcome], kind: Kind, request: Request) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and a row for each variant."""
    return [*_COLUMNS, kind.quality, "as one process"], [_row(outcome, request) for outcome in outcomes]


def _row(outcome: Outcome, request: Request) -> list[str]:
    low, high = min(outcome.times_s), max(outcome.times_s)
    return [
        outcome.variant,
        f"{outcome.median_s:.3g}",
        f"{low:.3g}..{high:.3g}",
        f"{1e3 * outcome.median_s / (request.steps - request.warm_up):.3g}",
        f"{outcome.speed_up:.2f}",
        f"{100 * outcome.efficiency:.0f} %",
        "-" if outcome.waiting is None else f"{100 * outcome.waiting:.0f} %",
        f"{outcome.loss:.5g}",
        f"{outcome.quality:.4g}",
        _verdict(outcome),
    ]


def _verdict(outcome: Outcome) -> str:
    if not outcome.agrees:
        return f"differs by {outcome.difference:.0e}, by step {outcome.departs_at}"
    before = "" if outcome.blurs_at is None else f", before step {outcome.blurs_at}"
    return f"yes, within {outcome.difference:.0e}{before}"


def table(outcomes: Sequence[Outcome], kind: Kind, request: Request) -> Any:
    """What is printed."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    columns, rows = cells(outcomes, kind, request)
    for column in columns:
        shown.add_column(column, justify="left" if column in ("variant", "as one process") else "right", no_wrap=True)
    for row, outcome in zip(rows, outcomes, strict=True):
        shown.add_row(*row, style=None if outcome.agrees else "yellow")
    return shown


def notes(
    outcomes: Sequence[Outcome], skipped: Mapping[str, str], kind: Kind, request: Request, *, dropout: str, apart: bool = False
) -> list[str]:
    """What must be known to read the table, in sentences.

    Args:
        outcomes: of the variants.
        skipped: reasons by variant.
        kind: the recipe.
        request: what was asked.
        dropout: what became of it: "off", "kept", or "none" where the configuration has none.
        apart: whether layers normalise over the samples of a rank.
    """
    return list(_notes(outcomes, skipped, kind, request, dropout, apart=apart))


def _notes(
    outcomes: Sequence[Outcome], skipped: Mapping[str, str], kind: Kind, request: Request, dropout: str, *, apart: bool
) -> Iterator[str]:
    for variant, reason in skipped.items():
        yield f"{variant} was left out: {reason}."
    for outcome in outcomes:
        if not outcome.agrees:
            yield f"{outcome.variant} does not train the same model: {_because(outcome, dropout, apart=apart)}."
        if outcome.eager_because is not None:
            yield f"{outcome.variant} ran eagerly: {outcome.eager_because}."
    if dropout == "off":
        yield "Dropout is off: it draws different numbers on each rank, so no two variants would have the same losses. --dropout keeps it."
    together = next((outcome for outcome in outcomes if outcome.backend != "solo"), None)
    moved = "" if together is None else f", backend {together.backend}"
    threads = "" if request.on_gpus else f", {request.threads} thread{'s' if request.threads > 1 else ''} each, also for one process"
    yield (
        f"time: {request.steps - request.warm_up} steps after {request.warm_up} of warm-up, median of {request.repeats} "
        f"run{'s' if request.repeats > 1 else ''} in turns; {request.ranks} {'GPUs' if request.on_gpus else 'processes on CPUs'}{moved}{threads}."
    )
    yield "efficiency: speed-up divided by the number of processes; waiting: share of a step spent waiting for sums and for the slowest rank."
    yield (
        f"loss and {kind.quality}: after the last step, on held-out data. As one process: no loss of the run is further from the reference's than "
        "rounding explains, as measured by a second run of the reference with the rows of each batch in reverse order."
    )
    if outcomes[0].blurs_at is not None:
        yield (
            f"By step {outcomes[0].blurs_at} rounding alone moves the losses of one process by more than a tenth: from there on they tell little, "
            "and do not count. A lower learning rate keeps it small."
        )
    if request.repeats < _LEAST_RUNS:
        yield f"{request.repeats} run{'s' if request.repeats > 1 else ''} each: too few to tell the fastest; give --repeats {_LEAST_RUNS} or more."


def _because(outcome: Outcome, dropout: str, *, apart: bool) -> str:
    if dropout == "kept":
        return "dropout draws different numbers on each rank"
    if apart and outcome.variant != "data_parallel":
        too = "; besides, it averages the mean losses of the ranks" if outcome.variant in MEANS else ""
        return f"model.batch_norm=local normalises over the images of each rank alone, and with sync over those of all{too}"
    if outcome.variant in MEANS:
        return "it averages the mean losses of the ranks, which is not the mean over all samples where ranks have different counts"
    if outcome.variant == "data_parallel":
        return "each replica applies BatchNorm, if there is any, to its own part of the batch"
    return f"by step {outcome.departs_at} its losses differ by {outcome.difference:.0e}, and rounding explains {outcome.allowed:.0e}"


def rows_of(outcomes: Sequence[Outcome], kind: Kind, request: Request, name: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each variant, with all that is needed to measure it again, as those of the benches."""
    origin = {"machine": machine(), "versions": versions(), "command": shlex.join(words), "commit": commit()}
    return [
        {
            "what": f"compare.{request.recipe}.{name}/{outcome.variant}",
            "value": outcome.median_s,
            "unit": "s",
            "ranks": ranks_of(outcome.variant, request),
            "variant": outcome.variant,
            "devices": outcome.devices,
            "device": outcome.device,
            "backend": outcome.backend,
            "steps": request.steps - request.warm_up,
            "steps_of_warm_up": request.warm_up,
            "speed_up": outcome.speed_up,
            "efficiency": outcome.efficiency,
            "waiting": outcome.waiting,
            "loss": outcome.loss,
            kind.quality: outcome.quality,
            "agrees": outcome.agrees,
            "difference": outcome.difference,
            "allowed": outcome.allowed,
            "departs_at": outcome.departs_at,
            "losses": list(outcome.losses),
            **origin,
            "samples": list(outcome.times_s),
        }
        for outcome in outcomes
    ]


# Pictures -------------------------------------------------------------------------------------------------------------------------------------


def _bars(axes: Any, outcomes: Sequence[Outcome]) -> None:
    times = [outcome.median_s for outcome in outcomes]
    around = [[o.median_s - min(o.times_s) for o in outcomes], [max(o.times_s) - o.median_s for o in outcomes]]
    colours = ["lightgrey" if o.devices == 1 else "tab:blue" if o.agrees else "tab:orange" for o in outcomes]
    bars = axes.barh([o.variant for o in outcomes], times, xerr=around, color=colours, ecolor="grey", capsize=2)
    labels = [f"{o.median_s:.3g}{'' if o.devices == 1 else f', {o.speed_up:.2f}x'}{'' if o.agrees else ', differs'}" for o in outcomes]
    axes.bar_label(bars, labels, padding=4, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * max(max(o.times_s) for o in outcomes))
    axes.set_xlabel("training time, seconds")
    axes.grid(visible=True, axis="x", alpha=0.3)


def _curves(axes: Any, outcomes: Sequence[Outcome], request: Request) -> None:
    sizes = request.stretches()
    middles = [sum(sizes[:index]) + size / 2 for index, size in enumerate(sizes)]
    for index, outcome in enumerate(outcomes):
        axes.plot(middles, outcome.losses, label=outcome.variant, linewidth=max(1.0, 4.0 - index / 2), alpha=0.7)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


def draw(outcomes: Sequence[Outcome], request: Request, title: str, picture: Path) -> None:
    """Draws training times and losses into a PNG, which appears whole."""
    figure = new_figure(12, 1.5 + max(3.0, 0.4 * len(outcomes)))
    figure.suptitle(title)
    _bars(figure.add_subplot(1, 2, 1), outcomes)
    _curves(figure.add_subplot(1, 2, 2), outcomes, request)
    write_png(figure, picture)


def write_html(
    outcomes: Sequence[Outcome], kind: Kind, request: Request, title: str, told: Sequence[str], words: Sequence[str], path: Path
) -> None:
    """Writes the page, which appears whole."""
    bars, curves = new_figure(5, 1.0 + 0.4 * len(outcomes)), new_figure(5, 3.5)
    _bars(bars.add_subplot(1, 1, 1), outcomes)
    _curves(curves.add_subplot(1, 1, 1), outcomes, request)
    columns, rows = cells(outcomes, kind, request)
    page = Page(title)
    page.figure("Training time", svg_of(bars), "Grey: one process. Orange: does not train the same model. Lines: fastest and slowest run.")
    page.table("In numbers", columns, rows)
    page.list("Notes", told)
    page.figure("Training loss", svg_of(curves), "Where all variants train the same model, only the line drawn last is visible.")
    page.table("Variants", ("variant", "is"), [[outcome.variant, VARIANTS[outcome.variant]] for outcome in outcomes])
    page.origin(machine(), versions(), commit(), shlex.join(words))
    write_page(page, path)
