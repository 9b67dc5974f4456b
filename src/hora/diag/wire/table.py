"""The measurements as a table in the terminal."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from hora.diag.wire.request import say_size

_COLUMNS = ("size", "backend", "algorithm", "ranks", "median", "min..max", "alg GB/s", "bus GB/s", "% of limit", "x of first")


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each row, a section for each size on each number of ranks; times of a call in microseconds."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        shown.add_column(column, justify="left" if column in ("backend", "algorithm") else "right", no_wrap=True)
    for _, section in groupby(rows, key=lambda row: (row["bytes"], row["ranks"], row["device"])):
        lines = list(section)
        # What is captured is compared with what is captured.
        first_us = {row["captured"]: row["median_us"] for row in reversed(lines)}
        for row in lines:
            shown.add_row(*_cells(row, first_us[row["captured"]]), end_section=row is lines[-1])
    return shown


def _cells(row: Mapping[str, Any], first_us: float) -> list[str]:
    return [
        say_size(row["bytes"]),
        row["backend"],
        row["algorithm"] + (" in a graph" if row["captured"] else ""),
        str(row["ranks"]),
        f"{_us(row['median_us'])} us",
        f"{_us(row['min_us'])}..{_us(row['max_us'])}",
        f"{row['alg_gb_s']:.3g}",
        f"{row['bus_gb_s']:.3g}",
        f"{100 * row['bus_gb_s'] / row['limit_gb_s']:.1f}",
        f"{row['median_us'] / first_us:.2f}",
    ]


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the columns mean, for the limits that these rows have."""
    limits = dict.fromkeys(f"{row['device']}: {row['limit']}" for row in rows)
    return [
        "median, min and max: microseconds of a call on the slowest rank; x of first: times of the first line of its section "
        "(in a graph: of the first in a graph), less is faster",
        f"limit: all ranks at once copy the 2(n-1)/n of the bytes that each must send ({'; '.join(limits)}), in the same rounds",
    ]
