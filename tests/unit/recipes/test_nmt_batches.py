import itertools

import numpy as np
import pytest

from hora.errors import ConfigError
from hora.plan.seeds import seed_at
from hora.recipes.nmt.batches import MOST_BUCKETS, BatchPlan, choose_bounds, shuffled
from hora.recipes.nmt.corpus import Side, Text
from hora.recipes.nmt.stream import PairStream
from hora.recipes.nmt.symbols import BOS, EOS, PAD

LENGTHS = np.array([1 + (number * number) % 41 for number in range(300)])


@pytest.mark.parametrize("use_bucket", [True, False])
@pytest.mark.parametrize(("key", "size"), [("tokens", 90), ("samples", 7)])
def test_each_sentence_comes_once_and_no_batch_is_over_the_cap(use_bucket, key, size):
    plan = BatchPlan(LENGTHS, size=size, key=key, use_bucket=use_bucket, seed=5)
    batches = plan.epoch(2)
    assert sorted(np.concatenate([batches[step] for step in range(len(batches))])) == list(range(300))
    for step, bucket in enumerate(batches.buckets):
        assert 0 < len(batches[step]) <= bucket.rows
        assert LENGTHS[batches[step]].max() <= bucket.length
        assert bucket.rows * (bucket.length if key == "tokens" else 1) <= size
    assert len(set(batches.buckets)) <= MOST_BUCKETS


def test_orders_depend_on_seed_and_epoch_alone():
    def order(seed, epoch):
        return BatchPlan(LENGTHS, size=90, key="tokens", seed=seed).epoch(epoch).order.tolist()

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed, epoch in itertools.product((1, 2), (0, 1))}) == 4


def test_without_shuffling_the_order_is_that_of_the_text():
    batches = BatchPlan(LENGTHS, size=90, key="tokens", use_bucket=False, shuffle=False).epoch(3)
    assert batches.order.tolist() == list(range(300))
    bucketed = BatchPlan(LENGTHS, size=90, key="tokens", shuffle=False).epoch(3)
    last = [bucketed[step][-1] for step in range(len(bucketed))]
    assert last == sorted(last)


def test_few_batches_are_not_full():
    batches = BatchPlan(LENGTHS, size=200, key="tokens", seed=5).epoch(0)
    assert sum(len(batches[step]) < bucket.rows for step, bucket in enumerate(batches.buckets)) <= 1


def test_hashes_are_those_of_the_plans_seeds():
    key = 12345678901234567890
    expected = sorted(range(50), key=lambda position: seed_at(key, position))
    assert shuffled(np.arange(50), key).tolist() == expected


@pytest.mark.parametrize("most", [1, 2, 3])
def test_bounds_pad_least(most):
    lengths = np.array([1, 2, 2, 3, 9, 10, 10, 10, 31, 32])

    def padded(bounds):
        return sum(min(bound for bound in bounds if bound >= length) for length in lengths)

    candidates = (2, 4, 10, 32)
    best = min(padded([*chosen, 32]) for count in range(most) for chosen in itertools.combinations(candidates[:-1], count))
    found = choose_bounds(lengths, most)
    assert len(found) <= most
    assert found == sorted(found)
    assert padded(found) == best


def test_sentence_longer_than_a_global_batch_is_refused():
    with pytest.raises(ConfigError, match=r"padded is 42 tokens, but has 40; .*batch_size.*max_len"):
        BatchPlan(LENGTHS, size=40, key="tokens")


def text_of(lengths):
    sides = []
    for shift in (0, 1):
        own = [1 + (length + shift) % 9 for length in lengths]
        numbers = np.concatenate([np.full(length, 10 + index) for index, length in enumerate(own)]).astype(np.int32)
        sides.append(Side(numbers, np.cumsum(own)))
    return Text(*sides)


@pytest.mark.parametrize(("world_size", "update_cycle"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize(("key", "size"), [("tokens", 40), ("samples", 5)])
def test_ranks_share_each_global_batch_in_micro_batches_of_one_shape(world_size, update_cycle, key, size):
    text = text_of(range(83))

    def stream(rank, world_size):
        return PairStream(text, "", batch_size=size, update_cycle=update_cycle, key=key, seed=2, rank=rank, world_size=world_size)

    whole = stream(0, 1).batches(0)
    for index, steps in enumerate(zip(*(stream(rank, world_size) for rank in range(world_size)), strict=True)):
        held = [list(step) for step in steps]
        shapes = {(tuple(source.shape), tuple(target.shape)) for batches in held for source, target in batches}
        assert len(shapes) == len({len(batches) for batches in held}) == 1
        (rows, length), _ = shapes.pop()
        assert rows * (length if key == "tokens" else 1) <= size
        found = [row for batches in held for source, target in batches for row in zip(source.tolist(), target.tolist(), strict=True)]
        sentences = [(source, target) for source, target in found if any(source)]
        assert [source[0] - 10 for source, _ in sentences] == whole[index].tolist()
        for source, target in sentences:
            number = source[0] - 10
            for row, side in ((source, text.source), (target[1:], text.target)):
                expected = [*side[number].tolist(), EOS]
                assert row == expected + [PAD] * (len(row) - len(expected))
            assert target[0] == BOS
        assert all(not any(target) for source, target in found if not any(source))


def test_target_tokens_are_counted_with_their_ends():
    text = text_of(range(20))
    stream = PairStream(text, "", batch_size=4, rank=0, world_size=1)
    counted = sum(stream.num_target_tokens(step) for step in stream)
    assert counted == text.target.lengths.sum() + 20


def test_text_with_an_empty_side_has_batches():
    text = Text(Side(np.zeros(0, np.int32), np.array([0, 0])), Side(np.array([7], np.int32), np.array([1, 1])))
    ((source, target),) = next(iter(PairStream(text, "", batch_size=2, shuffle=False, rank=0, world_size=1)))
    assert source.tolist() == [[EOS, PAD], [EOS, PAD]]
    assert target.tolist() == [[BOS, 7, EOS], [BOS, EOS, PAD]]
