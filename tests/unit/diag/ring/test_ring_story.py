import io
import json

import pytest
from rich.console import Console

from hora.diag.ring import story
from hora.plan import ring


@pytest.mark.parametrize("size", [1, 2, 4, 9, 64])
def test_there_is_a_row_for_each_rank_and_step(size):
    steps = list(story.rows(size))
    assert [len(step) for step in steps] == [size] * (2 * (size - 1))
    assert len(list(story.lines(size))) == 1 + 2 * (size - 1) * size


def test_rows_say_what_the_schedule_does():
    steps = list(story.rows(4))
    assert steps[0][1] == ("1 scatter-reduce", "1", "chunk 1 (b) to 2", "chunk 0 from 0, adds it", "ab b b b")
    assert steps[3][0] == ("4 all-gather", "0", "chunk 1 (bcda) to 1", "chunk 0 from 3, keeps it", "abcd bcda cda da")
    assert {row.holds for row in steps[-1]} == {"abcd bcda cdab dabc"}


def test_ranks_without_letters_are_counted():
    assert list(story.rows(9))[1][0].holds == "chunk 7: 3/9; 0 of 9 chunks whole"
    assert list(story.rows(9))[-1][0].holds.endswith("9 of 9 chunks whole")


def test_the_table_shows_every_row():
    out = io.StringIO()
    Console(file=out, width=140).print(story.table(3))
    shown = out.getvalue()
    assert "Ring all-reduce of 3 ranks" in shown
    assert all(row.sends in shown and row.holds in shown for step in story.rows(3) for row in step)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_json_is_the_schedule(size):
    written = json.loads(story.as_json(size))
    assert (written["ranks"], written["chunks_sent_by_each_rank"]) == (size, 2 * (size - 1))
    assert written["data_sent_by_each_rank"] == pytest.approx(2 * (size - 1) / size)
    for found, step in zip(written["steps"], ring.steps(size), strict=True):
        assert [(move["sends"], move["receives"], move["adds"]) for move in found["moves"]] == [
            (move.sent, move.received, move.adds) for move in step.moves
        ]
        assert [move["to"] for move in found["moves"]] == [(rank + 1) % size for rank in range(size)]
        assert [move["then_holds"] for move in found["moves"]] == [
            list(step.held[rank][move.received]) for rank, move in enumerate(step.moves)
        ]
