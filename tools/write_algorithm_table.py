"""Writes the table of algorithm "auto" that comes with Hora anew, from the rows of benchmarks/results/."""

import json
from pathlib import Path
from typing import Any

from hora.diag.wire.choices import entries_from
from hora.plan.algorithm_table import Table, dump

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = ROOT / "src" / "hora" / "comm" / "algorithms" / "auto.json"

# Of two rows about the same the later file's counts: it has more rounds.
ONE_NODE = ("allreduce", "allreduce-gloo")
TWO_NODES = "hierarchical"


def read(name: str) -> list[dict[str, Any]]:
    """The rows of a file."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def one_node() -> list[dict[str, Any]]:
    """The rows of the bench."""
    by_place: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for name in ONE_NODE:
        fresh: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in read(name):
            fresh.setdefault((row["backend"], row["ranks"], row["bytes"]), []).append(row)
        by_place |= fresh
    return [row for rows in by_place.values() for row in rows]


def two_nodes() -> list[dict[str, Any]]:
    """The rows of benchmarks/hierarchical.py, `hierarchical.in-turns.4MiB/ring`, as those of the bench; Gloo, 2 nodes, milliseconds."""
    rows = []
    for row in read(TWO_NODES):
        (_, placed, size), algorithm = row["what"].split("/")[0].split("."), row["what"].split("/")[1]
        place = {"device": "cpu", "backend": "gloo", "ranks": row["ranks"], "nodes": 2, "interleaved": placed == "in-turns"}
        rows.append(place | {"bytes": int(size.removesuffix("MiB")) << 20, "algorithm": algorithm, "samples": row["samples"]})
    return rows


def table() -> str:
    """The text of the table."""
    return dump(Table().updated(entries_from([*one_node(), *two_nodes()])))


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
