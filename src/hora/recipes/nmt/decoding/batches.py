"""Which sentences are translated together, and by which rank. Pure; imports no torch.

Batches depend on the sentences alone, so that the number of ranks changes no shape and no result; they are dealt out whole.
"""

from collections.abc import Sequence
from typing import Final

_USUAL_LENGTH: Final = 64


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """The sentences of each batch by their index: of like length together, the longest first; those of length 0 in none.

    A batch has `batch_size` sentences, and fewer where they are long: no more than `batch_size` times 64 symbols, padding counted.
    """
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    begin = 0
    while begin < len(order):
        count = max(1, min(batch_size, batch_size * _USUAL_LENGTH // lengths[order[begin]]))
        batches.append(order[begin : begin + count])
        begin += count
    return batches


def deal_batches(batches: Sequence[Sequence[int]], lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """The batches of each rank by their index, in order: each goes to the rank with the least to do so far.

    A batch costs its sentences times its longest.
    """
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for number, batch in enumerate(batches):
        rank = min(range(world_size), key=lambda rank: (load[rank], rank))
        dealt[rank].append(number)
        load[rank] += len(batch) * max(lengths[index] for index in batch)
    return dealt
