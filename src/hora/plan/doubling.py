"""Recursive doubling as a schedule: who exchanges partial results with whom. Pure.

In each step a rank and its peer swap what they have and both combine it, so that it stands for twice as many ranks: log2(n) steps. Where n is no
power of two, pairs of neighbours at the front fold first: one gives the other its value and is given the result at the end (Thakur, Rabenseifner
and Gropp, Optimization of Collective Communication Operations in MPICH, 2005, section 4.5). Partial results always stand for consecutive ranks.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """What one rank does in one step with `peer`. What it receives is combined with its own, or takes its place."""

    peer: int
    sends: bool
    receives: bool
    combines: bool


def exchanges(rank: int, size: int) -> list[Exchange]:
    """What `rank` of `size` does, in turn."""
    places = 1 << (size.bit_length() - 1)
    folded = size - places  # pairs that play one place each

    def player(place: int) -> int:
        return 2 * place if place < folded else place + folded

    in_pair = rank < 2 * folded
    if in_pair and rank % 2 == 1:
        return [Exchange(rank - 1, True, False, False), Exchange(rank - 1, False, True, False)]
    place = rank // 2 if in_pair else rank - folded
    swaps = [Exchange(player(place ^ 1 << bit), True, True, True) for bit in range(places.bit_length() - 1)]
    if not in_pair:
        return swaps
    return [Exchange(rank + 1, False, True, True), *swaps, Exchange(rank + 1, True, False, False)]
