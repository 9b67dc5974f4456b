"""The measurements as rows, one for each variant of each point: for a file, for the table, for the picture. Loads no torch."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hora.diag.bench.rows import commit, machine, versions
from hora.diag.wire.request import GRAPH


def rows_of(point: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each variant of a point (the fields of `measure.Point`), the first variant first.

    Bandwidths are in GB/s, 10^9 bytes a second: `alg_gb_s` of the tensor, `bus_gb_s` of what each rank must send and receive, 2(n - 1)/n of it;
    `limit_gb_s` is that of the copy of as many bytes.
    """
    size, ranks, samples = point["size"], point["ranks"], dict(point["samples"])
    moved = 2 * (ranks - 1) * size / ranks
    limit_us = statistics.median(samples.pop("limit"))
    rows = []
    for variant, measured in samples.items():
        backend, algorithm, *how = variant.split("/")
        median_us = statistics.median(measured)
        rows.append(
            {
                "bytes": size,
                "backend": backend,
                "algorithm": algorithm,
                "captured": how == [GRAPH],
                "ranks": ranks,
                "nodes": point["nodes"],
                "interleaved": point["interleaved"],
                "device": point["device"],
                "median_us": median_us,
                "min_us": min(measured),
                "max_us": max(measured),
                "alg_gb_s": size / median_us / 1e3,
                "bus_gb_s": moved / median_us / 1e3,
                "limit_gb_s": moved / limit_us / 1e3,
                "limit": point["limit"],
                "samples": measured,
            }
        )
    return rows


def with_origin(rows: Sequence[Mapping[str, Any]], command: Sequence[str]) -> list[dict[str, Any]]:
    """The rows with all that is needed to measure them again, as those of the other benches."""
    origin = {"machine": machine(), "versions": versions(), "command": shlex.join(command), "commit": commit()}
    return [
        {"what": f"allreduce/{_say_variant(row)}/{row['bytes']}", "value": row["median_us"], "unit": "us", **row, **origin} for row in rows
    ]


def _say_variant(row: Mapping[str, Any]) -> str:
    return f"{row['backend']}/{row['algorithm']}{f'/{GRAPH}' if row['captured'] else ''}"
