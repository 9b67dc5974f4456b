import numpy as np
import pytest
from made_up_records import call

from hora.diag.prove.records import Rows
from hora.diag.prove.samples import Difference, compare_samples, difference


def keys(*rows: float, whole: bool) -> np.ndarray:
    return np.array([[row, 2 * row + 1] for row in rows], dtype=np.int64 if whole else np.float64)


@pytest.mark.parametrize("whole", [True, False])
def test_bags_differ_in_what_only_one_has(whole: bool) -> None:
    assert difference(keys(1, 2, 3, whole=whole), keys(3, 1, 2, whole=whole)).none
    assert difference(keys(1, 2, 2, 9, whole=whole), keys(1, 2, 7, whole=whole)) == Difference(extra=2, missing=1, repeated=1)
    assert difference(keys(whole=whole).reshape(0, 2), keys(1, whole=whole)) == Difference(0, 1, 0)


def test_real_rows_may_be_off_by_rounding() -> None:
    rows = np.random.default_rng(0).normal(size=(200, 2))
    assert difference(rows * (1 + 1e-7), rows[::-1]).none
    assert difference(rows * (1 + 1e-2), rows).extra > 100


def test_second_key_tells_rows_apart_that_the_first_does_not() -> None:
    assert difference(np.array([[1.0, 5.0], [1.0, 6.0]]), np.array([[1.0, 5.0], [1.0, 7.0]])) == Difference(1, 1, 0)


def test_parts_of_ranks_and_micro_steps_make_one_bag() -> None:
    seen = compare_samples([[call([0, 1]), call([2])], [call([3, 4, 5])]], [[call(range(6))]])
    assert (seen.same, seen.rows, seen.reference_rows, seen.by_rank) == (True, 6, 6, (3, 3))
    assert not seen.same_on_all_ranks


def test_samples_that_all_ranks_have_are_told() -> None:
    assert compare_samples([[call([1, 2])], [call([2, 1])]], [[call([1, 2, 3, 4])]]).same_on_all_ranks
    alike = [call([7, 7])]
    assert not compare_samples([alike, alike], [[call([7, 7, 7, 7])]]).same_on_all_ranks  # samples that are all alike tell nothing


def time_first(columns: list[int], time: int = 3) -> tuple[Rows, ...]:
    rows = np.array([[sum(columns) * (t + 1), t] for t in range(time)], dtype=np.int64)
    return (Rows("0", (time, len(columns)), "int64", (rows, np.array([[c, 2 * c] for c in columns], dtype=np.int64))),)


def test_data_with_time_first_is_compared_by_column() -> None:
    seen = compare_samples([[time_first([1, 2])], [time_first([3, 4])]], [[time_first([1, 2, 3, 4])]])
    assert (seen.same, seen.rows, seen.reference_rows) == (True, 4, 4)


def test_positions_that_every_call_has_alike_are_no_samples() -> None:
    position = Rows("1", (5,), "int64", (np.array([[t, t] for t in range(5)]),))
    seen = compare_samples([[(*call([1]), position)], [(*call([2]), position)]], [[(*call([1, 2]), position)]])
    assert seen.same


def test_rows_padded_to_other_lengths_are_not_compared() -> None:
    def padded(samples: list[int], length: int) -> tuple[Rows, ...]:
        keys = np.array([[sample + length, sample] for sample in samples], dtype=np.int64)
        return (Rows("0", (len(samples), length), "int64", (keys,)),)

    assert compare_samples([[padded([1], 5)], [padded([2], 9)]], [[padded([1, 2], 9)]]).same
    assert not compare_samples([[padded([1], 9)], [padded([2], 9)]], [[padded([1, 3], 9)]]).same


def test_nothing_seen_is_no_difference() -> None:
    assert compare_samples([[], []], [[]]).same
    assert not compare_samples([[], []], [[call([1])]]).seen
