import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.errors import ConfigError
from hora.plan.logical import LogicalRanks
from hora.plan.rows import RowPlan

cases = st.tuples(st.integers(2, 300), st.integers(1, 20), st.integers(1, 40))


def targets(plan: RowPlan, step: int, rows: range) -> list[int]:
    """Places in the stream of the targets that `rows` have in `step`."""
    return [plan.start(row) + column + 1 for row in rows for column in plan.columns(step)]


@given(cases)
def test_evaluation_uses_each_target_once(case: tuple[int, int, int]) -> None:
    plan = RowPlan(*case, drop_last=False)
    used = [place for step in range(plan.num_steps) for place in targets(plan, step, plan.rows(step))]
    assert sorted(used) == list(range(1, plan.num_tokens))
    assert all(1 <= len(plan.columns(step)) <= plan.window for step in range(plan.num_steps))
    assert all(plan.rows(step) for step in range(plan.num_steps))


@given(cases)
def test_each_row_reads_on_where_it_stopped(case: tuple[int, int, int]) -> None:
    plan = RowPlan(*case, drop_last=False)
    for row in range(plan.num_rows):
        columns = [plan.columns(step) for step in range(plan.num_steps) if row in plan.rows(step)]
        assert list(itertools.chain(*columns)) == list(range(sum(map(len, columns))))


@pytest.mark.parametrize(("num_tokens", "num_rows", "window"), [(103, 5, 4), (929_589, 20, 20), (100, 4, 5), (50, 7, 6)])
def test_training_reads_what_the_ptb_reader_reads(num_tokens: int, num_rows: int, window: int) -> None:
    """data[: rows * length] as [rows, length]; step i reads columns i * window on, (length - 1) // window steps."""
    plan, length = RowPlan(num_tokens, num_rows, window), num_tokens // num_rows
    assert plan.num_steps == (length - 1) // window
    assert [plan.start(row) for row in range(num_rows)] == [row * length for row in range(num_rows)]
    for step in (0, plan.num_steps - 1):
        assert plan.columns(step) == range(step * window, (step + 1) * window)
        assert plan.rows(step) == range(num_rows)


@given(cases, st.integers(1, 6), st.one_of(st.none(), st.integers(1, 5)), st.booleans())
def test_rows_are_dealt_to_ranks_whole_and_keep_their_micro_batch(
    case: tuple[int, int, int], world_size: int, micro_batch_size: int | None, drop_last: bool
) -> None:
    try:
        plan = RowPlan(*case, drop_last=drop_last)
    except ConfigError:
        return
    logical_ranks = LogicalRanks(world_size, world_size)
    dealt = [[plan.deal(step, logical_ranks, rank, micro_batch_size) for rank in range(world_size)] for step in range(plan.num_steps)]
    for step, by_rank in enumerate(dealt):
        assert [row for parts in by_rank for part in parts for row in part.positions] == list(plan.rows(step))
        for rank, parts in enumerate(by_rank):
            assert all(set(part.positions) <= set(logical_ranks.share(range(plan.num_rows), rank)) for part in parts)
            assert [part.positions.start for part in parts] == [part.positions.start for part in dealt[0][rank]][: len(parts)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_tokens": 10, "num_rows": 0, "window": 0}, "global_batch_size must be at least 1, but is 0 instead; window must be"),
        ({"num_tokens": 104, "num_rows": 5, "window": 20}, "must have at least 105 tokens"),
        ({"num_tokens": 1, "num_rows": 1, "window": 5, "drop_last": False}, "must have at least 2 tokens"),
        ({"num_tokens": 0, "num_rows": 1, "window": 5, "drop_last": False}, "must have at least 2 tokens"),
    ],
)
def test_streams_without_a_step_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RowPlan(**settings)


def test_the_shortest_streams_are_enough() -> None:
    assert RowPlan(105, 5, 20).num_steps == 1
    assert RowPlan(2, 5, 20, drop_last=False).num_steps == 1
