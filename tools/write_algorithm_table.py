"""Writes the table of algorithm "auto" that comes with Hora anew, from the rows of benchmarks/results/."""

import json
from pathlib import Path
from typing import Any

from hora.diag.wire.choices import entries_from
from hora.plan.algorithm_table import Table, dump

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = ROOT / "src" / "hora" / "comm" / "algorithms" / "auto.json"

# Runs of one bench, whose samples are taken together. Of two benches of the same place and size the later one counts: it has more rounds, of the
# algorithms that come into question.
ONE_NODE = (("allreduce",), ("allreduce-gloo", "allreduce-gloo-again"), ("allreduce-shm",), ("allreduce-nccl",))
TWO_NODES = "hierarchical"


def read(name: str) -> list[dict[str, Any]]:
    """The rows of a file."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def one_node() -> list[dict[str, Any]]:
    """The rows of the bench."""
    by_place: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for runs in ONE_NODE:
        fresh: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for row in (row for name in runs for row in read(name) if not row.get("captured")):
            algorithms = fresh.setdefault((row["backend"], row["ranks"], row["bytes"]), {})
            before = algorithms.get(row["algorithm"], {"samples": []})
            algorithms[row["algorithm"]] = row | {"samples": before["samples"] + row["samples"]}
        by_place |= fresh
    return [row for algorithms in by_place.values() for row in algorithms.values()]


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
