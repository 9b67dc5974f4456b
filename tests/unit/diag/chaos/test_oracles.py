"""The oracles of `hora chaos` see what is wrong."""

from collections.abc import Iterator
from typing import Any

import pytest

from hora.diag.chaos import oracles
from hora.diag.chaos.journal import Event, Journal, named, read_events, recovery
from hora.diag.chaos.settings import BATCH, SAMPLES, Settings

PER_EPOCH = SAMPLES // BATCH


def history(*starts: tuple[str, int, int]) -> list[Event]:
    """Starts by name, first update and number of updates: each update gives its samples to two ranks."""

    def events() -> Iterator[Event]:
        for name, first, count in starts:
            yield Event(0.0, name, 0, "resumed", {"done": first})
            for update in range(first, first + count):
                epoch, step = divmod(update, PER_EPOCH)
                ids = list(range(step * BATCH, (step + 1) * BATCH))
                for rank in (0, 1):
                    yield Event(0.0, name, rank, "samples", {"epoch": epoch, "step": step, "ids": ids[rank::2]})
                yield Event(0.0, name, 0, "step", {"done": update + 1})

    return [Event(float(at_s), event.start, event.rank, event.name, event.fields) for at_s, event in enumerate(events())]


def test_updates_that_are_made_again_count_once() -> None:
    events = history(("a", 0, 8), ("b", 5, 7))
    assert list(oracles.each_sample_once(events, 2 * PER_EPOCH)) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda ids: ids[:-1], "epoch 1 must have each sample once, but has 0 several times and lacks 1"),
        (lambda ids: [*ids, 0], "epoch 1 must have each sample once, but has 1 several times and lacks 0"),
    ],
)
def test_a_lost_and_a_repeated_sample_are_seen(spoil: Any, said: str) -> None:
    events = history(("a", 0, 8), ("b", 5, 7))
    victim = named(events, "samples", "b")[-1]
    events[events.index(victim)] = Event(victim.at_s, "b", 1, "samples", {**victim.fields, "ids": spoil(victim.fields["ids"])})
    assert list(oracles.each_sample_once(events, 2 * PER_EPOCH)) == [said]


def test_an_update_that_nobody_made_again_is_seen() -> None:
    assert list(oracles.each_sample_once(history(("a", 0, 4), ("b", 5, 7)), PER_EPOCH)) == [
        f"epoch 0 must have each sample once, but has 0 several times and lacks {BATCH}"
    ]


def test_other_bits_on_one_rank_and_no_end_are_seen() -> None:
    ends = [Event(0.0, "a", rank, "end", {"digest": digest}) for rank, digest in ((0, "x" * 64), (1, "y" * 64))]
    assert list(oracles.same_bits(ends[:1], "x" * 64)) == []
    assert len(list(oracles.same_bits(ends, "x" * 64))) == 1
    assert "nobody has finished" in next(oracles.same_bits([], "x" * 64))


def test_codes_and_words_are_compared() -> None:
    assert list(oracles.ended_with(0, 0)) == []
    assert list(oracles.ended_with(1, 0)) == ["the exit code must be 0, but is 1"]
    assert list(oracles.says("rank 1 failed", r"rank \d failed")) == []
    assert list(oracles.says("rank 1 failed", "SIGKILL")) == ["nothing was said of 'SIGKILL'"]


def test_what_a_fault_cost_follows_from_the_journal() -> None:
    events = history(("a", 0, 8), ("b", 5, 7))
    further = next(event.at_s for event in named(events, "step", "b") if event.done == 9)
    assert recovery(events, 3.0) == {"lost_steps": 3, "recovered_s": further - 3.0}
    assert recovery(history(("a", 0, 8)), 3.0) == {}


def test_a_journal_is_read_as_it_was_written_but_for_half_a_line(tmp_path: Any) -> None:
    journal = Journal(tmp_path, "job-0", 1)
    journal.note("step", done=3)
    with (tmp_path / "journal" / "job-0-1.jsonl").open("a") as file:
        file.write('{"at_s": 1')
    assert [(event.start, event.rank, event.name, event.done) for event in read_events(tmp_path)] == [
        ("job-0", 1, "begin", 0),
        ("job-0", 1, "step", 3),
    ]
    settings = Settings("here", poison=(1, 7))
    assert Settings.from_json(settings.to_json()) == settings


def test_a_start_that_goes_on_beside_the_next_is_seen() -> None:
    one_after_the_other = history(("a", 0, 8), ("b", 5, 7))
    assert list(oracles.one_writer(one_after_the_other)) == []
    late = Event(one_after_the_other[-1].at_s, "a", 0, "saved", {"done": 8})
    assert "start b had gone on for" in next(oracles.one_writer([*one_after_the_other, late]))


def test_data_sets_of_other_sizes_are_counted() -> None:
    events = [event for event in history(("a", 0, PER_EPOCH)) if event.name == "samples"]
    assert list(oracles.each_sample_once(events, PER_EPOCH + 1, SAMPLES + 1)) == [
        "epoch 0 must have each sample once, but has 0 several times and lacks 1"
    ]
