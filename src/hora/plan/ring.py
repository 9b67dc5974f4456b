"""The ring all-reduce as a schedule: what each rank sends, receives and holds in each step. Pure, and the only place that knows.

The ranks stand in a ring and the data is cut into one chunk a rank. In the n - 1 steps of the scatter-reduce each rank sends one chunk to
its right and adds the one that comes from its left to its own; in the first, rank r sends chunk r, in each later one what it has just received.
Then each rank has one chunk of the result, and in n - 1 more steps, the all-gather, these go round. Each rank sends 2(n - 1) chunks, 2(n - 1)/n of
the data, which no all-reduce undercuts (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Contributions = tuple[int, ...]
"""The ranks whose values are in a chunk, in the order in which they were added."""


@dataclass(frozen=True)
class Move:
    """What one rank does in one step: chunk `sent` goes to the right, chunk `received` comes from the left and is added, or taken as it is."""

    sent: int
    received: int
    adds: bool


@dataclass(frozen=True)
class Step:
    """One step on all ranks: `moves[rank]`, and `held[rank][chunk]` afterwards."""

    moves: tuple[Move, ...]
    held: tuple[tuple[Contributions, ...], ...]


def scatter_reduce(size: int, owned: int) -> list[Move]:
    """The moves of a rank after which it has the sum of chunk `owned`; its right neighbour must own the next chunk, and so on round the ring."""
    return [Move((owned - 1 - step) % size, (owned - 2 - step) % size, True) for step in range(size - 1)]


def all_gather(size: int, owned: int) -> list[Move]:
    """The moves of a rank that begins with chunk `owned` alone, after which it has those of all; owners as in `scatter_reduce`."""
    return [Move((owned - step) % size, (owned - 1 - step) % size, False) for step in range(size - 1)]


def all_reduce(rank: int, size: int) -> list[Move]:
    """The moves of `rank` in the whole all-reduce. Each sends what the one before has received."""
    owned = owned_after_reduce(rank, size)
    return scatter_reduce(size, owned) + all_gather(size, owned)


def owned_after_reduce(rank: int, size: int) -> int:
    """The chunk whose sum `rank` has between the two halves of `all_reduce`."""
    return (rank + 1) % size


def steps(size: int) -> Iterator[Step]:
    """The all-reduce of `size` ranks, step by step."""
    held: list[list[Contributions]] = [[(rank,)] * size for rank in range(size)]
    for moves in zip(*(all_reduce(rank, size) for rank in range(size)), strict=True):
        held = [_after(move, held[rank], held[rank - 1]) for rank, move in enumerate(moves)]
        yield Step(moves, tuple(map(tuple, held)))


def _after(move: Move, mine: Sequence[Contributions], left: Sequence[Contributions]) -> list[Contributions]:
    """What a rank holds after `move`, from what it and its left neighbour held before."""
    after = list(mine)
    after[move.received] = left[move.received] + (mine[move.received] if move.adds else ())
    return after
