"""What a run has come to as rows for a file of measurements."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hora.comm.session import session
from hora.diag.bench import rows

_LAST: Final = ("perplexity", "BLEU", "share")


def rows_of(name: str, found: Mapping[tuple[str, str], Sequence[float]], command: str) -> list[dict[str, Any]]:
    """One row for each measurement of which there are samples.

    Args:
        name: of the recipe and the run, such as `lm/small`.
        found: samples by what they are and their unit. The value of a perplexity, BLEU or share is the last one, of a time or a speed the median.
        command: that made them.
    """
    return [_row(f"{name}/{what}", unit, samples, command) for (what, unit), samples in found.items() if samples]


def _row(what: str, unit: str, samples: Sequence[float], command: str) -> dict[str, Any]:
    return {
        "what": what,
        "value": samples[-1] if unit in _LAST else statistics.median(samples),
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
