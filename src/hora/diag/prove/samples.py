"""Which samples a step saw: bags of row keys, compared between runs and between ranks. Pure functions, NumPy alone.

Rows of the same input (the same slot, kind and number of dimensions) make a bag, whatever micro-batch or rank they are in.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hora.diag.prove.records import Array, Rows

TOLERANCE: Final = 1e-4
"""Relative to the largest key of the bag: as far apart as one row may be in two runs. Other rows are farther."""

Calls = Sequence[Sequence[Rows]]
Stream = tuple[str, str, int]


@dataclass(frozen=True)
class Bag:
    """The rows of one input over some calls, along both dimensions."""

    keys: tuple[Array, ...]
    sizes: frozenset[tuple[int, ...]]

    def count(self, dim: int) -> int:
        """How many rows there are along `dim`."""
        return len(self.keys[dim]) if dim < len(self.keys) else 0


def bags(calls: Calls) -> dict[Stream, Bag]:
    """The inputs of some calls that tell samples apart: the first of each call, and all whole numbers."""
    found: dict[Stream, list[Rows]] = {}
    for call in calls:
        for position, rows in enumerate(call):
            if rows.keys and (position == 0 or rows.whole):
                found.setdefault((rows.slot, "whole" if rows.whole else "real", len(rows.shape)), []).append(rows)
    return {stream: _bag(rows) for stream, rows in found.items()}


def _bag(rows: Sequence[Rows]) -> Bag:
    dims = min(len(each.keys) for each in rows)
    return Bag(tuple(np.concatenate([each.keys[dim] for each in rows]) for dim in range(dims)), frozenset(each.shape for each in rows))


@dataclass(frozen=True)
class Difference:
    """How the rows of one bag differ from those of another: how many only it has, how many only the other has, and how many of the former
    the other has too, only less often.
    """

    extra: int
    missing: int
    repeated: int

    @property
    def none(self) -> bool:
        """Whether they are the same."""
        return not self.extra and not self.missing


def difference(keys: Array, reference: Array) -> Difference:
    """Compares two bags of keys, in any order."""
    if keys.dtype.kind == "i" and reference.dtype.kind == "i":
        ours, theirs = (Counter(map(tuple, bag.tolist())) for bag in (keys, reference))
        extra = ours - theirs
        return Difference(extra.total(), (theirs - ours).total(), sum(count for key, count in extra.items() if key in theirs))
    return _real_difference(keys.astype(np.float64), reference.astype(np.float64))


def _real_difference(keys: Array, reference: Array) -> Difference:
    both = np.concatenate([keys, reference])
    groups = _group(both)
    ours, theirs = Counter(groups[: len(keys)].tolist()), Counter(groups[len(keys) :].tolist())
    extra = ours - theirs
    return Difference(extra.total(), (theirs - ours).total(), sum(count for key, count in extra.items() if key in theirs))


def _group(keys: Array) -> Array:
    """A number for each row, the same for rows that are as good as equal: neighbours in the order of the first key, then of the second."""
    if not len(keys):
        return np.zeros(0, dtype=np.int64)
    scale = np.abs(keys[np.isfinite(keys).all(1)]).max(initial=1e-300) * TOLERANCE
    first = _clusters(keys[:, 0], scale)
    order = np.lexsort((keys[:, 1], first))
    with np.errstate(invalid="ignore"):
        apart = np.diff(keys[order, 1], prepend=keys[order[:1], 1]) > scale
    group = np.empty(len(keys), dtype=np.int64)
    group[order] = np.cumsum(apart | (np.diff(first[order], prepend=first[order[:1]]) > 0))
    return group


def _clusters(values: Array, gap: float) -> Array:
    """Which cluster each value is in; clusters are at least `gap` apart."""
    order = np.argsort(values, kind="stable")
    with np.errstate(invalid="ignore"):
        steps = np.diff(values[order], prepend=values[order[:1]]) > gap
    clusters = np.empty(len(values), dtype=np.int64)
    clusters[order] = np.cumsum(steps)
    return clusters


def distinct(keys: Array) -> int:
    """How many different rows there are."""
    return len(set(map(tuple, keys.tolist()))) if keys.dtype.kind == "i" else int(_group(keys).max(initial=-1)) + 1


@dataclass(frozen=True)
class SampleComparison:
    """The samples of one step in two runs.

    Attributes:
        seen: whether any input was seen in both.
        comparable: whether different keys mean different samples: not where rows are padded to other lengths.
        rows, reference_rows: samples of the step.
        by_rank: samples of each rank.
        same_on_all_ranks: whether every rank had the same samples, which are not all alike.
    """

    seen: bool
    comparable: bool
    difference: Difference
    rows: int
    reference_rows: int
    by_rank: tuple[int, ...] = ()
    same_on_all_ranks: bool = False

    @property
    def same(self) -> bool:
        """Whether the samples are the same, as far as can be told."""
        return not self.seen or self.difference.none or not self.comparable

    @property
    def growth(self) -> float:
        """How many times the samples of the reference."""
        return self.rows / self.reference_rows if self.reference_rows else 1.0


NOTHING: Final = SampleComparison(False, True, Difference(0, 0, 0), 0, 0)


def compare_samples(by_rank: Sequence[Calls], reference: Sequence[Calls]) -> SampleComparison:
    """Compares the samples that the ranks of a run saw in a step with those of the reference."""
    ours, theirs = bags(_flat(by_rank)), bags(_flat(reference))
    streams = [stream for stream in ours if stream in theirs]
    if not streams:
        return NOTHING
    ranks = [bags(calls) for calls in by_rank]
    lead = streams[0]
    dim = batch_dim(ours[lead], theirs[lead])
    differences = {stream: _difference(ours[stream], theirs[stream], dim) for stream in streams}
    # What every call has alike, such as positions, is no sample.
    constant = [stream for stream in streams[1:] if _is_constant(stream, [*_flat(by_rank), *_flat(reference)])]
    worst = max(
        (stream for stream in streams if stream not in constant), key=lambda stream: differences[stream].extra + differences[stream].missing
    )
    return SampleComparison(
        seen=True,
        comparable=ours[worst].sizes == theirs[worst].sizes or _same_beyond(ours[worst], theirs[worst], dim),
        difference=differences[worst],
        rows=ours[lead].count(dim),
        reference_rows=theirs[lead].count(dim),
        by_rank=tuple(bag[lead].count(dim) if lead in bag else 0 for bag in ranks),
        same_on_all_ranks=_same_on_all(ranks, [stream for stream in streams if stream not in constant], dim, theirs[lead]),
    )


def _flat(by_rank: Iterable[Calls]) -> list[Sequence[Rows]]:
    return [call for calls in by_rank for call in calls]


def batch_dim(ours: Bag, theirs: Bag) -> int:
    """The dimension that samples lie along: 1 for data with time first."""
    if len(ours.keys) < 2 or len(theirs.keys) < 2 or difference(ours.keys[0], theirs.keys[0]).none:
        return 0
    if ours.keys[1].shape == theirs.keys[1].shape and difference(ours.keys[1], theirs.keys[1]).none:
        return 1
    first, second = ({size[dim] for size in ours.sizes | theirs.sizes} for dim in (0, 1))
    return 1 if len(first) == 1 and len(second) > 1 else 0


def _difference(ours: Bag, theirs: Bag, dim: int) -> Difference:
    dim = min(dim, len(ours.keys) - 1, len(theirs.keys) - 1)
    return difference(ours.keys[dim], theirs.keys[dim])


def _same_beyond(ours: Bag, theirs: Bag, dim: int) -> bool:
    """Whether the sizes beside the batch dimension are the same."""
    others = [{tuple(size for index, size in enumerate(shape) if index != dim) for shape in bag.sizes} for bag in (ours, theirs)]
    return others[0] == others[1] and len(others[0]) == 1


def _is_constant(stream: Stream, calls: Sequence[Sequence[Rows]]) -> bool:
    found = [rows for call in calls for rows in call if (rows.slot, "whole" if rows.whole else "real", len(rows.shape)) == stream]
    return all(rows.shape == found[0].shape and np.array_equal(rows.keys[0], found[0].keys[0]) for rows in found)


def _same_on_all(ranks: Sequence[Mapping[Stream, Bag]], streams: Sequence[Stream], dim: int, reference: Bag) -> bool:
    if len(ranks) < 2 or any(stream not in bag for bag in ranks for stream in streams):
        return False
    if distinct(reference.keys[min(dim, len(reference.keys) - 1)]) == 1 < reference.count(dim):
        return False  # samples that are all alike tell nothing
    return all(_difference(bag[stream], ranks[0][stream], dim).none for bag in ranks[1:] for stream in streams)
