"""What must hold of the ring's schedule, for any number of ranks."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hora.plan import ring

sizes = st.integers(1, 40)


@given(sizes)
def test_every_rank_ends_with_every_contribution_to_every_chunk_once(size):
    *_, last = [None, *ring.steps(size)]
    assert (last is None) == (size == 1)
    for held in last.held if last else ():
        for contributions in held:
            assert Counter(contributions) == Counter(range(size))


@given(sizes)
def test_every_rank_has_the_same_sums_in_the_same_order(size):
    *_, last = [None, *ring.steps(size)]
    assert last is None or len(set(last.held)) == 1


@given(sizes)
def test_each_rank_sends_and_receives_two_times_all_chunks_but_one(size):
    for rank in range(size):
        assert len(ring.all_reduce(rank, size)) == 2 * (size - 1)
    for step in ring.steps(size):
        assert len({move.sent for move in step.moves}) == size


@given(sizes)
def test_what_comes_from_the_left_is_what_the_left_sends(size):
    for step in ring.steps(size):
        for rank, move in enumerate(step.moves):
            assert move.received == step.moves[rank - 1].sent
            assert move.adds == step.moves[rank - 1].adds


@given(sizes)
def test_a_rank_sends_on_what_it_has_just_received(size):
    for rank in range(size):
        moves = ring.all_reduce(rank, size)
        assert [move.sent for move in moves[1:]] == [move.received for move in moves[:-1]]


def test_rank_n_begins_by_sending_chunk_n_and_receiving_the_one_before():
    assert [(move.sent, move.received, move.adds) for move in ring.all_reduce(1, 4)] == [
        (1, 0, True),
        (0, 3, True),
        (3, 2, True),
        (2, 1, False),
        (1, 0, False),
        (0, 3, False),
    ]


@given(sizes.flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))))
def test_halves_leave_each_rank_its_chunk_and_bring_it_to_all(case):
    size, offset = case
    held = [[(rank,)] * size for rank in range(size)]
    for moves in zip(*(ring.scatter_reduce(size, (rank + offset) % size) for rank in range(size)), strict=True):
        held = [ring._after(move, held[rank], held[rank - 1]) for rank, move in enumerate(moves)]
    assert all(sorted(held[rank][(rank + offset) % size]) == list(range(size)) for rank in range(size))
    for moves in zip(*(ring.all_gather(size, (rank + offset) % size) for rank in range(size)), strict=True):
        held = [ring._after(move, held[rank], held[rank - 1]) for rank, move in enumerate(moves)]
    assert all(sorted(chunk) == list(range(size)) for rank in range(size) for chunk in held[rank])
