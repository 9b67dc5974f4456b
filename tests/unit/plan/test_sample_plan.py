import itertools
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.errors import ConfigError
from hora.plan.logical import LogicalRanks
from hora.plan.samples import GivenOrder, SamplePlan, deal, micro_batches

sizes = st.integers(1, 200)


@given(sizes, sizes, st.booleans(), st.integers(0, 9))
def test_an_epoch_holds_every_sample_once(num_samples: int, global_batch_size: int, shuffle: bool, epoch: int) -> None:
    plan = SamplePlan(num_samples, global_batch_size, seed=1, shuffle=shuffle)
    batches = [list(plan.global_batch(epoch, step)) for step in range(plan.steps_per_epoch)]
    assert sorted(itertools.chain(*batches)) == list(range(num_samples))
    assert [len(batch) for batch in batches[:-1]] == [global_batch_size] * (len(batches) - 1)
    assert 1 <= len(batches[-1]) <= global_batch_size


@given(sizes, sizes, st.integers(1, 9), st.integers(0, 3))
def test_shares_of_any_number_of_ranks_make_up_the_global_batch(num_samples: int, global_batch_size: int, ranks: int, epoch: int) -> None:
    plan = SamplePlan(num_samples, global_batch_size, seed=2)
    for step in range(plan.steps_per_epoch):
        shares = [plan.share(epoch, step, rank, ranks) for rank in range(ranks)]
        assert list(itertools.chain(*shares)) == list(plan.global_batch(epoch, step))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 100), st.integers(1, 8), st.integers(1, 8), st.one_of(st.none(), st.integers(1, 30)))
def test_micro_batches_of_all_ranks_make_up_the_global_batch(size: int, world_size: int, more: int, micro_batch_size: int | None) -> None:
    logical_ranks = LogicalRanks(world_size * more, world_size)
    dealt = [deal(range(7, 7 + size), logical_ranks, rank, micro_batch_size) for rank in range(world_size)]
    flat = list(itertools.chain(*dealt))
    assert list(itertools.chain(*(part.positions for part in flat))) == list(range(7, 7 + size))
    assert [part.logical_rank for part in flat] == sorted(part.logical_rank for part in flat)
    assert all(1 <= len(part.positions) <= (micro_batch_size or size) for part in flat)
    for rank, parts in enumerate(dealt):
        assert {part.logical_rank for part in parts} <= set(logical_ranks.played_by(rank))


def test_logical_ranks_get_the_same_whatever_the_number_of_real_ones() -> None:
    dealt = [
        list(itertools.chain(*(deal(range(100), LogicalRanks(8, world_size), rank, 5) for rank in range(world_size))))
        for world_size in (1, 2, 3, 4, 8)
    ]
    assert all(parts == dealt[0] for parts in dealt)


@pytest.mark.parametrize(
    ("size", "micro_batch_size", "lengths"), [(10, None, [10]), (10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (0, 4, []), (0, None, [])]
)
def test_a_share_is_cut_without_empty_parts(size: int, micro_batch_size: int | None, lengths: list[int]) -> None:
    assert [len(part) for part in micro_batches(range(size), micro_batch_size)] == lengths


def test_orders_differ_by_epoch_and_seed_and_are_repeatable() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(SamplePlan(100, 100, seed).global_batch(epoch, 0))

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(found) for found in orders}) == 9
    assert orders == [order(seed, epoch) for seed in range(3) for epoch in range(3)]


def test_without_shuffling_samples_come_in_their_own_order() -> None:
    plan = SamplePlan(10, 4, shuffle=False)
    assert [list(plan.global_batch(3, step)) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_ragged_end_is_kept_or_dropped() -> None:
    assert SamplePlan(10, 4).steps_per_epoch == 3
    assert SamplePlan(10, 4, drop_last=True).steps_per_epoch == 2
    assert SamplePlan(8, 4, drop_last=True).steps_per_epoch == 2
    with pytest.raises(IndexError):
        SamplePlan(10, 4, drop_last=True).global_batch(0, 2)


def test_any_step_of_ten_billion_samples_is_at_hand() -> None:
    plan = SamplePlan(10**10, 512)
    assert plan.steps_per_epoch == 19_531_250
    last = plan.global_batch(123, plan.steps_per_epoch - 1)
    assert len(set(last)) == 512


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 0, "global_batch_size": 0}, "at least one sample, but is empty; global_batch_size must be at least 1, but is 0"),
        ({"num_samples": 3, "global_batch_size": 4, "drop_last": True}, "3 samples make no global batch of 4"),
    ],
)
def test_plans_without_a_step_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplePlan(**settings)


def test_a_given_order_keeps_its_batches() -> None:
    order = GivenOrder()
    for batch in ([5, 3], [9], [1, 1, 2]):
        order.append(batch)
    assert order.num_steps == 3
    assert [list(order.indices(order.positions(step))) for step in range(3)] == [[5, 3], [9], [1, 1, 2]]
    assert order.positions(2) == range(3, 6)
    assert order.samples == array("q", [5, 3, 9, 1, 1, 2])


def test_an_empty_global_batch_is_refused() -> None:
    order = GivenOrder()
    order.append([1])
    with pytest.raises(ConfigError, match="number 1 is empty"):
        order.append([])
