"""Which sentences are translated together, and by which rank. Pure; imports no torch.

Batches depend on the sentences alone, so that the number of ranks changes no shape and no result; they are dealt out whole.
"""

from collections.abc import Sequence


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """The sentences of each batch by their index: of like length together, the longest first; those of length 0 in none."""
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: (-lengths[index], index))
    return [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]


def deal_batches(batches: Sequence[Sequence[int]], lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """The batches of each rank by their index, in order: each goes to the rank with the least to do so far.

    A batch costs its sentences times its longest. None costs more than one before it, so that the n-th ones of all ranks take about as long.
    """
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for number, batch in enumerate(batches):
        rank = min(range(world_size), key=lambda rank: (load[rank], rank))
        dealt[rank].append(number)
        load[rank] += len(batch) * max(lengths[index] for index in batch)
    return dealt
