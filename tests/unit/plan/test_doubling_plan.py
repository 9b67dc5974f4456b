"""What must hold of recursive doubling, for any number of ranks."""

import math
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from hora.plan.doubling import exchanges


def played(size: int) -> tuple[list[tuple[int, ...]], int]:
    """What each rank has in the end, left to right, and how many rounds of messages that took; fails where ranks wait for each other."""
    held = [(rank,) for rank in range(size)]
    waiting = [deque(exchanges(rank, size)) for rank in range(size)]
    rounds = 0
    while any(waiting):
        pairs = [
            (rank, queue[0].peer)
            for rank, queue in enumerate(waiting)
            if queue and waiting[queue[0].peer] and waiting[queue[0].peer][0].peer == rank
        ]
        assert pairs, "every rank waits for another one"
        before = list(held)
        for rank, peer in pairs:
            mine, theirs = waiting[rank][0], waiting[peer][0]
            assert (mine.sends, mine.receives) == (theirs.receives, theirs.sends)
            if mine.receives:
                sides = (before[peer], before[rank]) if peer < rank else (before[rank], before[peer])
                held[rank] = sides[0] + sides[1] if mine.combines else before[peer]
        for rank, _ in pairs:
            waiting[rank].popleft()
        rounds += 1
    return held, rounds


@given(st.integers(1, 70))
def test_every_rank_ends_with_all_in_the_order_of_ranks(size):
    held, _ = played(size)
    assert held == [tuple(range(size))] * size


@given(st.integers(1, 70))
def test_rounds_are_the_logarithm_and_two_more_where_ranks_fold(size):
    _, rounds = played(size)
    assert rounds == math.floor(math.log2(size)) + (0 if size & (size - 1) == 0 else 2)


def test_five_ranks_fold_the_first_pair():
    assert [(each.peer, each.sends, each.receives) for each in exchanges(1, 5)] == [(0, True, False), (0, False, True)]
    assert [each.peer for each in exchanges(0, 5)] == [1, 2, 3, 1]
    assert [each.peer for each in exchanges(4, 5)] == [3, 2]
