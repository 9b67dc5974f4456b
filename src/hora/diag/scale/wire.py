"""What a sum over ranks takes, by latency and bandwidth, fitted to what `hora bench allreduce` has measured.

The models are those of Thakur, Rabenseifner and Gropp ("Optimization of Collective Communication Operations in MPICH", 2005): with n ranks, b
bytes, a latency A for a message and B seconds for a byte

- ring: `2 (n - 1) A + 2 (n - 1) / n b B`,
- tree: `2 ceil(log2 n) A + 2 b B`,
- hierarchical, r ranks on each of m nodes: a ring of r inside and a ring of m between the nodes, each with A and B of its own.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Sum(NamedTuple):
    """One that was measured."""

    ranks: int
    nodes: int
    size_bytes: int
    took_s: float


Terms = Callable[[int, int], tuple[float, float]]
"""How many latencies, and how many bytes one after the other, a sum over so many ranks of so many bytes takes."""


def ring(ranks: int, size_bytes: int) -> tuple[float, float]:
    """Bandwidth that does not fall with ranks, latency that grows with them."""
    return 2.0 * (ranks - 1), 2.0 * (ranks - 1) / ranks * size_bytes


def tree(ranks: int, size_bytes: int) -> tuple[float, float]:
    """Latency that grows with the logarithm."""
    return (0.0, 0.0) if ranks == 1 else (2.0 * math.ceil(math.log2(ranks)), 2.0 * size_bytes)


@dataclass(frozen=True)
class Line:
    """Latency and bandwidth of one kind of wire under one pattern.

    Attributes:
        terms: of the pattern.
        latency_s: of a message.
        byte_s: of a byte.
        error: root of the mean square of what it misses, relative to what was measured.
    """

    terms: Terms
    latency_s: float
    byte_s: float
    error: float

    def took_s(self, ranks: int, size_bytes: int) -> float:
        """What a sum is expected to take."""
        messages, num_bytes = self.terms(ranks, size_bytes)
        return messages * self.latency_s + num_bytes * self.byte_s


@dataclass(frozen=True)
class Wire:
    """A pattern, fitted.

    Attributes:
        name: "ring", "tree" or "hierarchical".
        near: inside a node, or everywhere.
        far: between nodes; None: as near as all others.
        ranks_per_node: those that are near.
    """

    name: str
    near: Line
    far: Line | None = None
    ranks_per_node: int = 0

    @property
    def error(self) -> float:
        """By which part it misses what was measured."""
        return self.near.error if self.far is None else max(self.near.error, self.far.error)

    def took_s(self, ranks: int, size_bytes: int) -> float:
        """What a sum over `ranks` is expected to take, seconds."""
        if self.far is None:
            return self.near.took_s(ranks, size_bytes)
        near = min(ranks, self.ranks_per_node)
        return self.near.took_s(near, size_bytes) + self.far.took_s(math.ceil(ranks / near), size_bytes)

    def messages_s(self, ranks: int) -> float:
        """What the messages of an empty sum are expected to take, seconds."""
        return self.took_s(ranks, 0)


def fit(sums: Iterable[Sum]) -> list[Wire]:
    """All patterns that `sums` tell something of; none if there are none.

    Hierarchical where there are sums inside a node and sums between several; else ring and tree.
    """
    known = list(sums)
    near = [s for s in known if s.nodes == 1]
    far = [s for s in known if s.nodes > 1]
    if near and far:
        inside = fit_line(ring, near)
        per_node = max(s.ranks // s.nodes for s in far)
        between = [s._replace(ranks=s.nodes, took_s=max(s.took_s - inside.took_s(s.ranks // s.nodes, s.size_bytes), 0.0)) for s in far]
        return [Wire("hierarchical", inside, fit_line(ring, [s for s in between if s.took_s > 0] or far), per_node)]
    return [Wire(name, fit_line(terms, known)) for name, terms in (("ring", ring), ("tree", tree))] if known else []


def fit_line(terms: Terms, sums: Sequence[Sum]) -> Line:
    """Least squares of the relative errors, with neither number below zero."""
    rows = [(messages / s.took_s, num_bytes / s.took_s) for s in sums for messages, num_bytes in [terms(s.ranks, s.size_bytes)]]
    latency_s, byte_s = _solve(rows)
    misses = [messages * latency_s + num_bytes * byte_s - 1.0 for messages, num_bytes in rows]
    return Line(terms, latency_s, byte_s, math.sqrt(sum(miss * miss for miss in misses) / len(misses)))


def _solve(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The x and y from 0 for which `x a + y b` is nearest to 1 in all rows (a, b)."""
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
    candidates = [(a / aa if aa else 0.0, 0.0), (0.0, b / bb if bb else 0.0)]
    return min(candidates, key=lambda xy: sum((xy[0] * row[0] + xy[1] * row[1] - 1) ** 2 for row in rows))


def sums_of(rows: Iterable[Mapping[str, Any]], backend: str, device: str) -> list[Sum]:
    """The sums of `backend` on `device` among the rows of `hora bench allreduce`, by its own algorithm, not in graphs."""
    return [
        Sum(row["ranks"], row["nodes"], row["bytes"], row["median_us"] / 1e6)
        for row in rows
        if (row.get("backend"), row.get("device"), row.get("algorithm")) == (backend, device, "native") and not row.get("captured")
    ]
