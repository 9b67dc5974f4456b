"""Which algorithm an all-reduce takes: looked up in a table of what has been measured. Pure.

A table has an entry for each device, backend, number of ranks and of nodes that was measured; an entry says from how many bytes on which
algorithm was the fastest.
"""

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

NATIVE: Final = "native"
"""What is chosen where nothing was measured."""

_FORMAT: Final = 1


@dataclass(frozen=True)
class Entry:
    """What was measured in one place.

    Attributes:
        device: "cpu" or "cuda".
        ranks: of all nodes together.
        interleaved: whether neighbours in the order of the job stand on different nodes.
        steps: pairs of a size in bytes and the algorithm from there on, by size.
    """

    device: str
    backend: str
    ranks: int
    nodes: int
    interleaved: bool
    steps: tuple[tuple[int, str], ...]

    @property
    def place(self) -> tuple[str, str, int, bool]:
        """What it is about, but for the number of ranks."""
        return self.device, self.backend, self.nodes, self.interleaved

    def at(self, size_bytes: int) -> str:
        """The algorithm of the largest size up to `size_bytes`; `native` below all."""
        return next((algorithm for begin, algorithm in reversed(self.steps) if begin <= size_bytes), NATIVE)


@dataclass(frozen=True)
class Table:
    """All entries, no two of one place and number of ranks."""

    entries: tuple[Entry, ...] = ()

    def updated(self, entries: Collection[Entry]) -> "Table":
        """The table with `entries` in the place of those for the same place and ranks."""
        merged = {(*entry.place, entry.ranks): entry for entry in (*self.entries, *entries)}
        return Table(tuple(merged[key] for key in sorted(merged)))

    def over(self, other: "Table") -> "Table":
        """This table, and of `other` what is about places that this one says nothing of."""
        mine = {entry.place for entry in self.entries}
        return Table(self.entries + tuple(entry for entry in other.entries if entry.place not in mine))


def choose(table: Table, size_bytes: int, device: str, backend: str, ranks: int, nodes: int, *, interleaved: bool = False) -> str:
    """The algorithm for a tensor of `size_bytes`: that of the largest measured size which is no larger, at the nearest number of ranks.

    Numbers of ranks are near by their ratio; of two equally near ones the smaller counts. One node is never compared with several.
    """

    def fits(entry: Entry) -> bool:
        same_kind = (entry.device, entry.backend, entry.interleaved) == (device, backend, interleaved)
        return same_kind and (entry.nodes == 1) == (nodes == 1)

    def distance(entry: Entry) -> tuple[float, float, int]:
        return abs(math.log(entry.nodes / nodes)), abs(math.log(entry.ranks / ranks)), entry.ranks

    nearest = min(filter(fits, table.entries), key=distance, default=None) if ranks > 1 else None
    return NATIVE if nearest is None else nearest.at(size_bytes)


def dump(table: Table) -> str:
    """The table as JSON."""
    entries = [asdict(entry) | {"steps": {str(begin): algorithm for begin, algorithm in entry.steps}} for entry in table.entries]
    return json.dumps({"format": _FORMAT, "entries": entries}, indent=1) + "\n"


def parse(text: str, known: Collection[str]) -> Table:
    """The table of a JSON text.

    Args:
        text: as from `dump`.
        known: the algorithms that may stand in it.

    Raises:
        ValueError: it is none; says what is wrong.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("entries"), list):
        raise ValueError(f'it must be an object with "format": {_FORMAT} and a list of "entries"')
    return Table().updated([_parse_entry(entry, known) for entry in content["entries"]])


_FIELDS: Final = {"device": str, "backend": str, "ranks": int, "nodes": int, "interleaved": bool, "steps": dict}


def _parse_entry(content: Any, known: Collection[str]) -> Entry:
    if not isinstance(content, dict) or content.keys() != _FIELDS.keys():
        raise ValueError(f"an entry must have the keys {', '.join(_FIELDS)}, but is {content!r}")
    for name, kind in _FIELDS.items():
        if type(content[name]) is not kind:
            raise ValueError(f"{name} must be of type {kind.__name__}, but is {content[name]!r}")
    if not 1 <= content["nodes"] <= content["ranks"]:
        raise ValueError(f"an entry must have a node and a rank on each, but has {content['ranks']} ranks on {content['nodes']} nodes")
    if unknown := [name for name in content["steps"].values() if name not in known]:
        raise ValueError(f"unknown algorithm {unknown[0]!r}; known are {', '.join(known)}")
    steps = sorted((_parse_size(begin), algorithm) for begin, algorithm in content["steps"].items())
    return replace(Entry(**content), steps=tuple(steps))


def _parse_size(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"sizes must be whole numbers of bytes, but one is {text!r}")
    return int(text)
