"""Logical ranks: the fixed number of parts a global batch is dealt to, and which real rank plays which of them.

A run keeps its number of logical ranks whatever the number of real ones; without a wish there are as many as real ranks, one each. They are
the leaves of one fixed binary tree, in which sums over ranks can be taken in an order that no number of real ranks changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hora.errors import ConfigError

T = TypeVar("T")


def split(positions: range, parts: int, index: int) -> range:
    """Part `index` of `parts` contiguous ones whose sizes differ by at most one, the larger first (as `torch.tensor_split`)."""
    size, larger = divmod(len(positions), parts)
    begin = index * size + min(index, larger)
    return positions[begin : begin + size + (index < larger)]


@dataclass(frozen=True)
class LogicalRanks:
    """`count` logical ranks, played by `world_size` real ones, each a contiguous block of them."""

    count: int
    world_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= self.count:
            raise ConfigError(
                f"each real rank plays at least one logical rank, but there are {self.world_size} real ranks for {self.count} logical ones; "
                f"use from 1 to {max(self.count, 1)} ranks"
            )

    def played_by(self, rank: int) -> range:
        """The logical ranks that the real `rank` plays, in turn."""
        return split(range(self.count), self.world_size, rank)

    def share(self, positions: range, rank: int) -> range:
        """What the logical ranks that `rank` plays get of `positions` together."""
        played = self.played_by(rank)
        return range(split(positions, self.count, played[0]).start, split(positions, self.count, played[-1]).stop)

    def are_siblings(self, left: range, right: range) -> bool:
        """Whether the leaves `left` and `right` are the two halves of one node of the tree of sums."""
        size = len(left)
        whole = size & (size - 1) == 0 and left.start % (2 * size) == 0
        return whole and right == range(left.stop, min(left.stop + size, self.count))

    def push(self, partials: list[tuple[range, T]], leaves: range, value: T, add: Callable[[T, T], T]) -> None:
        """Puts the sum of `leaves` behind those of the leaves before them, and adds up what makes a node of the tree, left to right."""
        while partials and self.are_siblings(partials[-1][0], leaves):
            before, left = partials.pop()
            leaves, value = range(before.start, leaves.stop), add(left, value)
        partials.append((leaves, value))

    def total(self, partials: Sequence[tuple[range, T]], add: Callable[[T, T], T]) -> T:
        """The sum of all leaves, from partial sums of whole subtrees in order."""
        found: list[tuple[range, T]] = []
        for leaves, value in partials:
            self.push(found, leaves, value, add)
        ((leaves, value),) = found
        assert leaves == range(self.count)
        return value

    def subtrees(self, rank: int) -> list[range]:
        """The largest whole subtrees of the tree of sums that make up what `rank` plays: one partial sum travels for each.

        The tree pairs neighbours: a node of level k holds the leaves from a multiple of 2^k on, 2^k of them or what there is.
        """
        found: list[tuple[range, None]] = []
        for leaf in self.played_by(rank):
            self.push(found, range(leaf, leaf + 1), None, lambda _, __: None)
        return [leaves for leaves, _ in found]
