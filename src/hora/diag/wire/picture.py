"""The measurements as a picture: bus bandwidth over size, one plot for each number of ranks, with the limit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.diag.output import new_figure, write_png


def draw(rows: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draws the rows into a PNG, which appears whole."""
    places = list(dict.fromkeys((row["device"], row["ranks"]) for row in rows))
    figure = new_figure(6.5 * len(places), 5)
    for index, (device, ranks) in enumerate(places):
        axes = figure.add_subplot(1, len(places), index + 1, xlabel="bytes", ylabel="bus bandwidth, GB/s", title=f"{ranks} ranks, {device}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _draw_place(axes, [row for row in rows if (row["device"], row["ranks"]) == (device, ranks)])
    write_png(figure, picture)


def _draw_place(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    def variant_of(row: Mapping[str, Any]) -> tuple[str, ...]:
        return row["backend"], row["algorithm"], *(["in a graph"] if row["captured"] else [])

    for variant in dict.fromkeys(map(variant_of, rows)):
        mine = [row for row in rows if variant_of(row) == variant]
        axes.plot([row["bytes"] for row in mine], [row["bus_gb_s"] for row in mine], marker="o", markersize=3, label=" ".join(variant))
    limits = dict(sorted((row["bytes"], row["limit_gb_s"]) for row in rows))
    axes.plot(list(limits), list(limits.values()), color="black", linestyle="--", marker=".", label="limit")
    axes.legend(fontsize="small")
    axes.grid(visible=True, which="both", alpha=0.3)
