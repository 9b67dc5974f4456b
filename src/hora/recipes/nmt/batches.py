"""Which sentences make up which global batch: a pure function of lengths, settings, seed and epoch, the same whatever the number of ranks.

Sentences go into buckets by length. A bucket has one padded length and one number of rows, so that steps have few shapes, and CUDA graphs
of them are found again. What a bucket has left over at the end of an epoch goes into the next longer one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from hora.errors import ConfigError
from hora.plan.seeds import derive_key

Indices = NDArray[np.int64]

MOST_BUCKETS: Final = 12
"""Of the shapes that this makes `TrainStep` keeps the graphs of all."""
_MULTIPLE: Final = 2
"""Padded lengths are multiples of this, which kernels like."""


@dataclass(frozen=True)
class Bucket:
    """Sentences of up to `length`, of which a global batch has at most `rows`."""

    length: int
    rows: int


@dataclass(frozen=True)
class EpochBatches:
    """The global batches of one epoch.

    Attributes:
        order: all sentences `[sentences]`.
        ends: where in `order` each batch ends `[batches]`.
        buckets: of each batch `[batches]`.
    """

    order: Indices
    ends: Indices
    buckets: list[Bucket]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, step: int) -> Indices:
        """The sentences of the global batch `step`."""
        return self.order[self.ends[step - 1] if step else 0 : self.ends[step]]


class BatchPlan:
    """Cuts epochs into global batches.

    Args:
        lengths: of each sentence, its longest side, int64 `[sentences]`.
        size: of a global batch, at most.
        key: what `size` counts: `samples`, or `tokens`: padded length times sentences.
        use_bucket: whether sentences of like length come together.
        shuffle: a new order each epoch; otherwise that of the text.
        seed: chooses the orders.

    Raises:
        ConfigError: there are no sentences, or one is longer than a global batch.
    """

    def __init__(
        self,
        lengths: Indices,
        *,
        size: int,
        key: Literal["samples", "tokens"],
        use_bucket: bool = True,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if not len(lengths):
            raise ConfigError("a text must have at least one pair, but has none")
        bounds = choose_bounds(lengths)
        if key == "tokens" and bounds[-1] > size:
            raise ConfigError(
                f"a global batch must have room for the longest sentence, which padded is {bounds[-1]} tokens, but has {size}; increase "
                "training_configs.batch_size, or set data_configs.max_len"
            )
        self.buckets = [Bucket(bound, size if key == "samples" else size // bound) for bound in bounds]
        self._of = np.searchsorted(bounds, lengths)
        self._use_bucket, self._shuffle, self._seed = use_bucket, shuffle, seed

    def epoch(self, epoch: int) -> EpochBatches:
        """The global batches of `epoch`."""
        order = np.arange(len(self._of))
        if self._shuffle:
            order = shuffled(order, derive_key("nmt pairs", self._seed, epoch))
        batches = list(self._bucketed(order) if self._use_bucket else self._in_order(order))
        if self._use_bucket:
            # Without shuffling a batch comes when its last sentence does.
            turns = shuffled(np.arange(len(batches)), derive_key("nmt batches", self._seed, epoch)) if self._shuffle else _by_last(batches)
            batches = [batches[turn] for turn in turns]
        ends = np.cumsum([len(batch) for batch, _ in batches])
        return EpochBatches(np.concatenate([batch for batch, _ in batches]), ends, [self.buckets[bucket] for _, bucket in batches])

    def _bucketed(self, order: Indices) -> Iterator[tuple[Indices, int]]:
        left = order[:0]
        for bucket, shape in enumerate(self.buckets):
            waiting = np.concatenate([left, order[self._of[order] == bucket]])
            whole = len(waiting) // shape.rows * shape.rows
            yield from ((batch, bucket) for batch in waiting[:whole].reshape(-1, shape.rows))
            left = waiting[whole:]
        if len(left):
            yield left, int(self._of[left].max())

    def _in_order(self, order: Indices) -> Iterator[tuple[Indices, int]]:
        begin, bucket = 0, 0
        for position, needed in enumerate(self._of[order].tolist()):
            wider = max(bucket, needed)
            if position - begin >= self.buckets[wider].rows:
                yield order[begin:position], bucket
                begin, wider = position, needed
            bucket = wider
        yield order[begin:], bucket


def _by_last(batches: list[tuple[Indices, int]]) -> Indices:
    return np.argsort([batch[-1] for batch, _ in batches], kind="stable")


def shuffled(values: Indices, key: int) -> Indices:
    """`values` in the order of hashes of their places (SplitMix64, see `hora.plan.seeds`), which no version of NumPy changes."""
    mixed = np.uint64(key) + (np.arange(len(values), dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D0_49BB_1331_11EB)
    return values[np.argsort(mixed ^ mixed >> np.uint64(31), kind="stable")]


def choose_bounds(lengths: Indices, most: int = MOST_BUCKETS) -> list[int]:
    """At most `most` padded lengths that pad `lengths` least, the last one for the longest."""
    rounded, counts = np.unique(-(-lengths // _MULTIPLE) * _MULTIPLE, return_counts=True)
    total = np.concatenate([[0], np.cumsum(counts)])
    # cost[i]: least padded tokens of the first i lengths in the buckets so far.
    cost = np.full(len(rounded) + 1, np.inf)
    cost[0] = 0
    choices: list[Indices] = []
    for _ in range(min(most, len(rounded))):
        # table[i, j]: a bucket of rounded[i] that begins behind the first j lengths.
        table = cost[None, :-1] + rounded[:, None] * (total[1:, None] - total[None, :-1])
        table[np.triu_indices(len(rounded), 1)] = np.inf
        choices.append(table.argmin(axis=1))
        cost = np.concatenate([[0], table.min(axis=1)])
    bounds: list[int] = []
    end = len(rounded)
    for choice in reversed(choices):
        if end == 0:
            break
        bounds.append(int(rounded[end - 1]))
        end = int(choice[end - 1])
    return bounds[::-1]
