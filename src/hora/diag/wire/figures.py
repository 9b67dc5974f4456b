"""What `hora bench allreduce --save` keeps of times, so that a job can be held against them: of `native`, by place and size."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hora import env, log
from hora.errors import ConfigError
from hora.plan.algorithm_table import NATIVE

_FORMAT: Final = 1
_PLACE: Final = ("device", "backend", "ranks", "nodes")


class Place(NamedTuple):
    """Where all-reduce was measured."""

    device: str
    backend: str
    ranks: int
    nodes: int


Figures = dict[Place, dict[int, float]]
"""For each place the microseconds of a call by its bytes."""


def figures_path() -> Path:
    """Where the user's figures are kept."""
    return env.state_dir() / "allreduce.json"


def save_figures(rows: Sequence[Mapping[str, Any]]) -> Path:
    """Puts the times of the rows in the place of what is kept of the same places; returns the path.

    Raises:
        ConfigError: it cannot be written there.
    """
    from hora.train.files import replace_file

    figures, path = read_figures(), figures_path()
    found: Figures = {}
    for row in rows:
        if row["algorithm"] == NATIVE and not row["captured"]:
            found.setdefault(Place(*(row[key] for key in _PLACE)), {})[row["bytes"]] = row["median_us"]
    entries = [
        {**place._asdict(), "median_us": {str(size): time_us for size, time_us in sorted(times.items())}}
        for place, times in sorted((figures | found).items())
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, (json.dumps({"format": _FORMAT, "entries": entries}, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another directory in HORA_STATE_DIR") from error
    return path


def read_figures() -> Figures:
    """What is kept; nothing where there is no file, or, with a warning, a damaged one."""
    path = figures_path()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f'"format" is {content["format"]!r}')
        return {
            Place(*(entry[key] for key in _PLACE)): {int(size): float(time_us) for size, time_us in entry["median_us"].items()}
            for entry in content["entries"]
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.get_logger().warning("%s is left out, for it is damaged: %s; `hora bench allreduce --save` writes it anew", path, error)
        return {}


def bandwidth_at(figures: Figures, place: Place, size_bytes: int) -> float | None:
    """GB/s, bytes of the tensor over time, of a call of `size_bytes`, between the nearest sizes measured; None where that is nowhere near."""
    times = sorted(figures.get(place, {}).items())
    if not times:
        return None
    sizes = [size for size, _ in times]
    if not sizes[0] / 2 <= size_bytes <= sizes[-1] * 2:
        return None
    size_bytes = min(max(size_bytes, sizes[0]), sizes[-1])
    (low, low_us), (high, high_us) = next(pair for pair in zip(times, [*times[1:], times[-1]], strict=True) if size_bytes <= pair[1][0])
    weight = 0.0 if high == low else (math.log(size_bytes) - math.log(low)) / (math.log(high) - math.log(low))
    time_us = math.exp((1 - weight) * math.log(low_us) + weight * math.log(high_us))
    return size_bytes / time_us / 1e3
