"""Rows for a file of measurements, of what a run has come to."""

from collections.abc import Sequence
from typing import Any

from hora.comm.session import session
from hora.diag.bench import rows


def result_row(what: str, value: float, unit: str, samples: Sequence[float], command: str) -> dict[str, Any]:
    """One measurement with where and how it was made."""
    return {
        "what": what,
        "value": value,
        "unit": unit,
        "ranks": session().world_size,
        "machine": _machine(),
        "versions": rows.versions(),
        "command": command,
        "commit": rows.commit(),
        "samples": list(samples),
    }


def _machine() -> str:
    num_nodes = session().topology.num_nodes
    return rows.machine() + (f", {num_nodes} nodes" if num_nodes > 1 else "")
