import hashlib
import itertools
import math
import time
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.errors import ConfigError
from hora.plan.permutation import MAX_LENGTH, Permutation

LENGTHS = [*range(70), 127, 128, 129, 255, 256, 257, 1000, 1024, 4095, 4097]
LARGE = [10**8, 10**10, 2**33, 2**33 + 1, MAX_LENGTH - 1, MAX_LENGTH]


def oracle(length: int, seed: int, epoch: int, position: int) -> int:
    """The same permutation written for one value at a time, from the description alone."""
    bits = max(2, (length - 1).bit_length())
    low_bits, high_bits = bits // 2, bits - bits // 2
    while True:
        high, low = divmod(position, 2**low_bits)
        for number in range(8 if bits > 8 else 24):
            text = f"{length} {seed} {epoch} {number}".encode()
            digest = hashlib.blake2b(text, digest_size=8, person=b"hora.permutation").digest()
            hashed = high if number % 2 else low
            for key, factor in ((digest[:4], 0x7FEB352D), (digest[4:], 0x846CA68B)):
                product = (hashed ^ int.from_bytes(key, "little")) * factor
                hashed = (product ^ product >> 32) % 2**32
            if number % 2:
                low ^= hashed % 2**low_bits
            else:
                high ^= hashed % 2**high_bits
        position = high * 2**low_bits + low
        if position < length:
            return position


def chi_square_z(counts: list[int], expected: float) -> float:
    """How many standard deviations the chi-square of `counts` lies above what chance gives."""
    freedom = len(counts) - 1
    return (sum((count - expected) ** 2 for count in counts) / expected - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_value_comes_once(length: int) -> None:
    assert sorted(Permutation(length, seed=7, epoch=1).take(range(length))) == list(range(length))


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_every_value_comes_once_for_any_seed_and_epoch(length: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(length, seed=seed, epoch=epoch).take(range(length))) == list(range(length))


@given(st.sampled_from([*LENGTHS[1:], *LARGE]), st.integers(0, 2**64), st.integers(0, 99), st.integers(0), st.integers(1, 40))
def test_values_equal_the_oracle(length: int, seed: int, epoch: int, begin: int, count: int) -> None:
    begin %= length
    positions = range(begin, min(begin + count, length))
    permutation = Permutation(length, seed=seed, epoch=epoch)
    expected = [oracle(length, seed, epoch, position) for position in positions]
    assert permutation.take(positions) == expected
    assert [permutation[position] for position in positions] == expected


def test_many_values_at_once_equal_one_by_one_across_blocks() -> None:
    permutation = Permutation(10**10, seed=1, epoch=2)
    positions = range(5 * 10**9 - 1500, 5 * 10**9 + 1500)
    assert permutation.take(positions) == [permutation[position] for position in positions]


@pytest.mark.parametrize("length", LARGE)
def test_large_ranges_have_no_value_twice_and_none_outside(length: int) -> None:
    values = Permutation(length, seed=3, epoch=0).take(range(length - 5000, length))
    assert len(set(values)) == 5000
    assert 0 <= min(values) <= max(values) < length


def test_order_is_that_of_saved_checkpoints() -> None:
    """These values stand for good: a position in a checkpoint means them."""
    assert Permutation(10, seed=0, epoch=0).take(range(10)) == [1, 7, 4, 5, 9, 3, 6, 8, 2, 0]
    assert Permutation(1000, seed=0, epoch=0).take(range(8)) == [841, 406, 93, 730, 851, 665, 678, 81]
    assert Permutation(1000, seed=0, epoch=1).take(range(8)) == [252, 366, 623, 819, 188, 938, 511, 480]
    assert Permutation(1000, seed=1, epoch=0).take(range(8)) == [41, 835, 45, 243, 878, 867, 359, 916]
    assert Permutation(10**10, seed=0, epoch=0).take(range(10**10 - 4, 10**10)) == [913617128, 7209167001, 5569832681, 6716038955]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_few_are_equally_likely(length: int) -> None:
    per_order = 100
    trials = per_order * math.factorial(length)
    found = Counter(tuple(Permutation(length, seed=5, epoch=epoch).take(range(length))) for epoch in range(trials))
    counts = [found[order] for order in itertools.permutations(range(length))]
    assert chi_square_z(counts, per_order) < 4


@pytest.mark.parametrize("length", [11, 64, 257])
@pytest.mark.parametrize("by", ["epoch", "seed"])
def test_each_position_takes_each_value_equally_often(length: int, by: str) -> None:
    trials = 30 * length
    counts = [[0] * length for _ in range(3)]
    for trial in range(trials):
        seed, epoch = (1, trial) if by == "epoch" else (trial, 1)
        permutation = Permutation(length, seed=seed, epoch=epoch)
        for row, position in zip(counts, (0, length // 2, length - 1), strict=True):
            row[permutation[position]] += 1
    assert all(chi_square_z(row, trials / length) < 4 for row in counts)


@pytest.mark.parametrize("length", [64, 1000, 50_000, 10**10])
def test_neighbours_are_not_related(length: int) -> None:
    """Serial correlation, and the distribution of differences, of consecutive values."""
    count = min(length, 20_000)
    difference_counts, products, pairs = [0] * 16, 0.0, 0
    for epoch in range(20_000 // count):
        values = Permutation(length, seed=2, epoch=epoch).take(range(count))
        for left, right in itertools.pairwise(values):
            products += (left / length - 0.5) * (right / length - 0.5)
            difference_counts[(right - left) % length * 16 // length] += 1
            pairs += 1
    # A shuffle of n values has a serial correlation of -1/n; each term of the sum has variance 1/144.
    expected = -pairs / 12 / length
    assert abs(products - expected) < 4 * math.sqrt(pairs / 144)
    if length >= 1000:  # below, the difference 0, which cannot occur, is missed
        assert chi_square_z(difference_counts, pairs / 16) < 4


def test_the_first_values_of_epochs_are_not_related() -> None:
    length = 10**10
    firsts = [Permutation(length, seed=0, epoch=epoch)[0] / length - 0.5 for epoch in range(4000)]
    products = sum(left * right for left, right in itertools.pairwise(firsts))
    assert abs(products) < 4 * math.sqrt(len(firsts) / 144)
    assert chi_square_z(list(Counter(int((first + 0.5) * 32) for first in firsts).values()), len(firsts) / 32) < 4


def test_fixed_points_are_as_many_as_chance_gives() -> None:
    trials = 3000
    found = sum(
        value == position
        for epoch in range(trials)
        for position, value in enumerate(Permutation(100, seed=0, epoch=epoch).take(range(100)))
    )
    assert abs(found - trials) < 4 * math.sqrt(trials)


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = {tuple(Permutation(50, seed=seed, epoch=epoch).take(range(50))) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_start_and_jump_take_under_ten_milliseconds_and_no_memory_at_ten_billion() -> None:
    def best_of(attempts: int) -> float:
        times = []
        for attempt in range(attempts):
            begin = time.perf_counter()
            Permutation(10**10, seed=0, epoch=attempt).take(range(9 * 10**9, 9 * 10**9 + 512))
            times.append(time.perf_counter() - begin)
        return min(times)

    assert best_of(20) < 0.010
    tracemalloc.start()
    Permutation(10**10, seed=0, epoch=0).take(range(9 * 10**9, 9 * 10**9 + 512))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


@pytest.mark.parametrize("length", [-1, MAX_LENGTH + 1])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match="must be from 0 to 2\\^62"):
        Permutation(length, seed=0, epoch=0)


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_out_of_range_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match="must be from 0 to 9"):
        Permutation(10, seed=0, epoch=0)[position]
