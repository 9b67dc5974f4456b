"""The rows as a picture: a bar for each variant, one plot for each workload, with the step of one process alone as the floor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.diag.output import new_figure, write_png
from hora.diag.steps.request import is_alone


def draw(rows: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draws the rows into a PNG, which appears whole."""
    workloads = {row["workload"]: [other for other in rows if other["workload"] == row["workload"]] for row in rows}
    most = max(map(len, workloads.values()))
    figure = new_figure(6.5 * len(workloads), 1.5 + 0.35 * most)
    for index, (workload, mine) in enumerate(workloads.items()):
        axes = figure.add_subplot(1, len(workloads), index + 1, xlabel="milliseconds a step", title=f"{workload}, {mine[0]['ranks']} ranks")
        _draw_workload(axes, mine)
    write_png(figure, picture)


def _draw_workload(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    ms = [row["ms"] for row in rows]
    around = [[row["ms"] - min(row["samples"]) for row in rows], [max(row["samples"]) - row["ms"] for row in rows]]
    bars = axes.barh([row["variant"] for row in rows], ms, xerr=around, color=[_colour(row) for row in rows], ecolor="grey", capsize=2)
    axes.bar_label(bars, [_label(row) for row in rows], padding=4, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(max(row["samples"]) for row in rows))
    if alone := [row["ms"] for row in rows if is_alone(row["variant"])]:
        axes.axvline(min(alone), color="black", linestyle="--", linewidth=1)
    axes.grid(visible=True, axis="x", alpha=0.3)


def _colour(row: Mapping[str, Any]) -> str:
    """Alone, in a CUDA graph, or neither."""
    return "lightgrey" if is_alone(row["variant"]) else "tab:orange" if row["captured"] else "tab:blue"


def _label(row: Mapping[str, Any]) -> str:
    efficiency = "" if row["efficiency"] is None else f", {100 * row['efficiency']:.0f} %"
    return f"{row['ms']:.3g}{efficiency}{' in a graph' if row['captured'] else ''}"
