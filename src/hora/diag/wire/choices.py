"""What algorithm "auto" learns from rows: the fastest of each size, where it is clearly faster than `native`. Loads no torch but to save."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from hora.diag.wire.request import ALGORITHMS, SYMMETRIC
from hora.errors import ConfigError
from hora.plan.algorithm_table import NATIVE, Entry, Table, dump

CANDIDATES: Final = tuple(name for name in ALGORITHMS if name != "auto")

_CLEARLY: Final = 0.9
"""Of the time of `native`: what is not faster than that may be as slow tomorrow."""
_SMALL_BYTES: Final = 4096
"""What holds of the smallest size measured holds of all smaller ones, if that is no larger than this: there it is messages that take the time."""

_PLACE: Final = ("device", "backend", "ranks", "nodes", "interleaved")


def entries_from(rows: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """An entry for each place in which `native` was measured."""

    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in _PLACE)

    entries = []
    for key, group in groupby(sorted(rows, key=place), key=place):
        if steps := tuple(_steps(list(group))):
            entries.append(Entry(**dict(zip(_PLACE, key, strict=True)), steps=steps))
    return entries


def _steps(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Sizes from which on another algorithm is the fastest."""
    before = None
    for size in sorted({row["bytes"] for row in rows}):
        measured = {
            row["algorithm"]: row["samples"]
            for row in rows
            if row["bytes"] == size and row["algorithm"] in CANDIDATES and not row.get("captured")
        }
        if NATIVE not in measured:
            continue
        name = _fastest(measured)
        if name != before:
            yield (0 if before is None and size <= _SMALL_BYTES else size), name
        before = name


def _fastest(measured: Mapping[str, Sequence[float]]) -> str:
    """The one with the smallest median, if it beats `native` by a tenth in the median and in two of three rounds, which both share."""
    native = measured[NATIVE]
    if SYMMETRIC in measured:  # of which `ordered` is another name where GPUs share memory
        measured = {name: samples for name, samples in measured.items() if name != "ordered"}
    name = min(measured, key=lambda each: statistics.median(measured[each]))
    wins = sum(mine < theirs for mine, theirs in zip(measured[name], native, strict=True))
    clearly = statistics.median(measured[name]) < _CLEARLY * statistics.median(native) and wins * 3 >= 2 * len(native)
    return name if clearly else NATIVE


def save(rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes what the rows say into the user's table, in the place of what stands there about the same places; returns its path.

    Raises:
        ConfigError: it cannot be written there.
    """
    from hora.comm.algorithms import own_algorithm_table
    from hora.comm.algorithms.auto import table_path
    from hora.plan.algorithm_table import parse
    from hora.train.files import replace_file

    path, text = table_path(), own_algorithm_table()
    before = Table() if text is None else parse(text, CANDIDATES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, dump(before.updated(entries_from(rows))).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another directory in HORA_STATE_DIR") from error
    return path
