"""Which sample goes where: a pure function of (seed, epoch, position).

An epoch is an order of samples, cut into global batches; the order and the cuts never depend on the number of ranks. A global batch is dealt
to logical ranks in contiguous parts, each rank cuts the parts it plays into micro-batches. Nothing is padded and nothing comes twice.
Positions (places in the epoch's order) are ranges throughout, so that only what a rank needs is ever computed.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hora.errors import ConfigError
from hora.plan.logical import LogicalRanks, split
from hora.plan.permutation import Permutation


class Order(Protocol):
    """The samples of one epoch in order, cut into global batches."""

    @property
    def num_steps(self) -> int:
        """Number of global batches."""

    @property
    def digest(self) -> str | None:
        """By which another order is told from one that was drawn; None of one that the plan can compute again."""

    def positions(self, step: int) -> range:
        """Places in the order that make up the global batch of `step`."""

    def indices(self, positions: range) -> Sequence[int]:
        """The samples at these places."""


@dataclass(frozen=True)
class MicroStep:
    """The part of a global batch that one forward and backward works on, and the logical rank it is done for."""

    logical_rank: int
    positions: range


def deal(positions: range, logical_ranks: LogicalRanks, rank: int, micro_batch_size: int | None) -> list[MicroStep]:
    """The micro-batches of `rank` of a global batch, in turn; none when it has no sample."""
    return [
        MicroStep(logical_rank, part)
        for logical_rank in logical_ranks.played_by(rank)
        for part in micro_batches(split(positions, logical_ranks.count, logical_rank), micro_batch_size)
    ]


def micro_batches(share: range, micro_batch_size: int | None) -> Iterator[range]:
    """Cuts a share into parts of `micro_batch_size`, the last one perhaps smaller; with None it stays whole. No part is empty."""
    size = micro_batch_size or len(share)
    return (share[begin : begin + size] for begin in range(0, len(share), size or 1))


@dataclass(frozen=True)
class SamplePlan:
    """Samples 0 to `num_samples` - 1, each once an epoch.

    Attributes:
        num_samples: size of the data set.
        global_batch_size: samples of one update, over all ranks.
        seed: chooses the orders, together with the epoch.
        shuffle: another order each epoch, or always that of the data set.
        drop_last: leave out the last global batch when it is smaller; otherwise it is kept with its true size.

    Raises:
        ConfigError: there is no sample, or no whole global batch with `drop_last`, or a size is below 1.
    """

    num_samples: int
    global_batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.num_samples < 1:
            problems.append("the data set must hold at least one sample, but is empty")
        if self.global_batch_size < 1:
            problems.append(f"global_batch_size must be at least 1, but is {self.global_batch_size} instead")
        if not problems and self.steps_per_epoch == 0:
            problems.append(
                f"an epoch must have at least one step, but {self.num_samples} samples make no global batch of {self.global_batch_size} and "
                "drop_last=True leaves the rest out; decrease global_batch_size or use drop_last=False"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def order(self, epoch: int) -> Order:
        """The order of one epoch; constant time and memory."""
        if not self.shuffle:
            return _PlannedOrder(self, lambda positions: positions)
        return _PlannedOrder(self, Permutation(self.num_samples, seed=self.seed, epoch=epoch).take)

    def global_batch(self, epoch: int, step: int) -> Sequence[int]:
        """The samples of one update, in order."""
        order = self.order(epoch)
        return order.indices(order.positions(step))

    def share(self, epoch: int, step: int, logical_rank: int, logical_ranks: int) -> Sequence[int]:
        """The part of the global batch that belongs to `logical_rank`; empty when there are fewer samples than logical ranks."""
        order = self.order(epoch)
        return order.indices(split(order.positions(step), logical_ranks, logical_rank))


@dataclass(frozen=True)
class _PlannedOrder:
    plan: SamplePlan
    take: Callable[[range], Sequence[int]]
    digest: None = None

    @property
    def num_steps(self) -> int:
        return self.plan.steps_per_epoch

    def positions(self, step: int) -> range:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step must be from 0 to {self.num_steps - 1}, but is {step} instead")
        size = self.plan.global_batch_size
        return range(step * size, min((step + 1) * size, self.plan.num_samples))

    def indices(self, positions: range) -> Sequence[int]:
        return self.take(positions)


@dataclass
class GivenOrder:
    """An order that somebody else drew, kept in memory at 8 bytes a sample; made batch by batch."""

    samples: "array[int]" = field(default_factory=lambda: array("q"))
    ends: "array[int]" = field(default_factory=lambda: array("q", [0]))

    def append(self, global_batch: Sequence[int]) -> None:
        """Adds one global batch at the end; an empty one would be a step without samples and is refused."""
        if not global_batch:
            raise ConfigError(f"each global batch must hold at least one sample, but number {self.num_steps} is empty")
        self.samples.extend(global_batch)
        self.ends.append(len(self.samples))

    @property
    def num_steps(self) -> int:
        """Number of global batches."""
        return len(self.ends) - 1

    @property
    def digest(self) -> str:
        """By which another order is told from this one."""
        return hashlib.blake2b(self.samples.tobytes() + self.ends.tobytes(), digest_size=16).hexdigest()

    def positions(self, step: int) -> range:
        """Places of the global batch `step`."""
        return range(self.ends[step], self.ends[step + 1])

    def indices(self, positions: range) -> Sequence[int]:
        """The samples at these places."""
        return self.samples[positions.start : positions.stop].tolist()
