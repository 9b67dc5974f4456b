"""Which ranks stand on which node, and who is whose counterpart on the other nodes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """The ranks of each node; a rank's place on its node is its index there, whatever order the nodes' ranks have in the job."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, node_of_rank: Sequence[int]) -> "Nodes":
        """From the node of each rank, by rank."""
        nodes = sorted(set(node_of_rank))
        return cls(tuple(tuple(rank for rank, of in enumerate(node_of_rank) if of == node) for node in nodes))

    @property
    def flat(self) -> bool:
        """Whether there is nothing to gain from nodes: there is only one, or each has one rank."""
        return len(self.ranks) == 1 or all(len(node) == 1 for node in self.ranks)

    @property
    def even(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return len({len(node) for node in self.ranks}) == 1

    @property
    def interleaved(self) -> bool:
        """Whether the ranks of some node do not follow one another in the order of the job."""
        return any(node[-1] - node[0] >= len(node) for node in self.ranks)

    @property
    def counterparts(self) -> tuple[tuple[int, ...], ...]:
        """The groups that speak across nodes: the ranks of each place, one a node; of uneven nodes only the first ranks."""
        return tuple(zip(*self.ranks, strict=True)) if self.even else (tuple(node[0] for node in self.ranks),)
