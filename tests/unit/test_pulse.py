"""What a rank says of its progress, as its launcher reads it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora import events
from hora.env import JOB_DIR
from hora.events import Mark
from hora.pulse import ASK, START_STEPS, Doing, Missing, Pulse, Section, Words, mine, page_path, read_words, stacks_path


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Pulse]:
    pulse = Pulse()
    pulse.open(300.0, {JOB_DIR: str(tmp_path), "RANK": "3"})
    yield pulse
    pulse.close()


def said(directory: Path) -> Words:
    words = read_words(page_path(directory, 3))
    assert words is not None
    return words


def train(page: Pulse, steps: int) -> None:
    for _ in range(steps):
        page.begin_step()
        page.end_step()


def test_a_rank_that_has_joined_is_in_its_start(page: Pulse, tmp_path: Path) -> None:
    words = said(tmp_path)
    assert (words.section, words.doing, words.steps) == (Section.START, Doing.OWN, 0)
    assert (words.pid, words.timeout_s) == (os.getpid(), 300.0)


def test_each_word_counts(page: Pulse, tmp_path: Path) -> None:
    before = said(tmp_path).count
    page.begin_step()
    page.rest()
    assert said(tmp_path).count == before + 2


def test_the_first_step_belongs_to_the_start(page: Pulse, tmp_path: Path) -> None:
    page.begin_step()
    assert (said(tmp_path).section, said(tmp_path).doing) == (Section.START, Doing.WORK)
    page.end_step()
    assert (said(tmp_path).section, said(tmp_path).doing) == (Section.EVALUATION, Doing.OWN)
    page.begin_step()
    assert said(tmp_path).section is Section.STEP


def test_some_more_steps_are_given_the_time_of_the_start(page: Pulse, tmp_path: Path) -> None:
    for _ in range(START_STEPS - 1):
        train(page, 1)
        assert said(tmp_path).is_starting
    with page.section(Section.CHECKPOINT):
        assert not said(tmp_path).is_starting
    page.begin_step()
    assert said(tmp_path).is_starting
    page.end_step()
    assert not said(tmp_path).is_starting


def test_a_checkpoint_is_left_for_what_was_before(page: Pulse, tmp_path: Path) -> None:
    train(page, START_STEPS)
    with page.section(Section.CHECKPOINT):
        assert (said(tmp_path).section, said(tmp_path).doing) == (Section.CHECKPOINT, Doing.WORK)
    assert (said(tmp_path).section, said(tmp_path).doing) == (Section.EVALUATION, Doing.OWN)


def test_a_collective_is_told_with_kind_and_number(page: Pulse, tmp_path: Path) -> None:
    page.begin_call("all_reduce", 7, 7)
    words = said(tmp_path)
    assert (words.doing, words.kind, words.call, words.begun, words.finished) == (Doing.CALL, "all_reduce", 7, 7, 0)
    page.end_call(7)
    words = said(tmp_path)
    assert (words.doing, words.kind, words.begun, words.finished) == (Doing.OWN, "", 7, 7)


def test_who_waits_for_others_to_be_ready_does_so_whatever_another_thread_calls(page: Pulse, tmp_path: Path) -> None:
    page.begin_step()
    with page.awaiting("gradients of layer 1"):
        page.begin_call("all_reduce", 0, 0)
        assert (said(tmp_path).doing, said(tmp_path).kind) == (Doing.CALL, "all_reduce")
        page.end_call(0)
        assert (said(tmp_path).doing, said(tmp_path).kind, said(tmp_path).call) == (Doing.WAIT, "gradients of layer 1", 0)
    assert (said(tmp_path).doing, said(tmp_path).kind) == (Doing.WORK, "")


def test_what_is_known_of_missing_ranks_is_no_progress_and_is_taken_back(page: Pulse, tmp_path: Path) -> None:
    before = said(tmp_path).count
    told = Missing((1, 3), "Missing ranks:\n1: [x]\n3: [\u00fc]")
    page.note(told.to_json())
    assert Missing.from_json(said(tmp_path).note) == told
    page.note("")
    assert Missing.from_json(said(tmp_path).note) == Missing()
    assert said(tmp_path).count == before


def test_a_note_has_room_for_much_and_half_of_one_says_nothing(page: Pulse, tmp_path: Path) -> None:
    page.note(Missing(tuple(range(10_000)), "\u00fc" * 10_000).to_json())
    read = Missing.from_json(said(tmp_path).note)
    assert read.ranks == tuple(range(len(read.ranks)))
    assert len(read.ranks) > 10
    assert set(read.text) == {"\u00fc"}
    for note in ('{"ranks": [1', "3", '{"ranks": 3, "text": ""}', "[]"):
        assert Missing.from_json(note) == Missing()


def test_others_may_be_waited_for_longer(page: Pulse, tmp_path: Path) -> None:
    page.allow(1800.0)
    assert said(tmp_path).timeout_s == 1800.0
    page.allow(float("inf"))
    assert said(tmp_path).timeout_s > 1e9


def test_time_is_told_by_what_it_went_into(page: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10**10, 11 * 10**9, 13 * 10**9, 17 * 10**9, 25 * 10**9])
    page.begin_step()
    monkeypatch.setattr("hora.pulse.perf_counter_ns", lambda: next(now))
    page.turn_to(Doing.DATA)
    page.rest()  # 1 s of data
    page.await_sums()
    page.begin_step()  # 4 s of waiting
    page.end_step()
    assert (said(tmp_path).data_s, said(tmp_path).waited_s) == (1.0, 4.0)


def test_a_closed_page_says_that_nobody_is_there_and_takes_words(page: Pulse, tmp_path: Path) -> None:
    page.close()
    page.begin_step()
    assert said(tmp_path).section is Section.OUTSIDE


@pytest.mark.parametrize("environ", [{}, {"RANK": "0"}, {JOB_DIR: "/nowhere", "RANK": "0"}, {JOB_DIR: "/tmp", "RANK": "x"}])
def test_without_a_launcher_words_go_nowhere(environ: dict[str, str]) -> None:
    pulse = Pulse()
    pulse.open(300.0, environ)
    train(pulse, 2)
    pulse.close()


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"\xff" * 4096])
def test_what_is_no_page_says_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(content)
    assert read_words(tmp_path / "page") is None
    assert read_words(tmp_path / "none") is None


MARKS = [
    (Mark.DATA_BEGIN, Doing.DATA),
    (Mark.DATA_END, Doing.OWN),
    (Mark.WINDOW_BEGIN, Doing.WORK),
    (Mark.DATA_BEGIN, Doing.DATA),
    (Mark.DATA_END, Doing.WORK),
    (Mark.LAST_BACKWARD, Doing.WORK),
    (Mark.BUCKET_SENT, Doing.WORK),
    (Mark.AGREE_BEGIN, Doing.WAIT),
    (Mark.AGREE_END, Doing.WORK),
    (Mark.BACKWARD_END, Doing.WAIT),
    (Mark.AGREE_BEGIN, Doing.WAIT),
    (Mark.AGREE_END, Doing.WAIT),
    (Mark.BUCKET_SUMMED, Doing.WAIT),
    (Mark.SUMS_END, Doing.WORK),
    (Mark.DEVICE_BEGIN, Doing.DEVICE),
    (Mark.DEVICE_END, Doing.WORK),
    (Mark.UPDATE_END, Doing.OWN),
    (Mark.GATHER_BEGIN, Doing.WAIT),
    (Mark.GATHER_END, Doing.OWN),
]


@pytest.mark.parametrize("listener", [events.Observer(), None], ids=["nobody", "a recorder"])
def test_marks_of_a_step_are_told(listener: events.Observer | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if listener is None:
        from hora.diag.report.recorder import Recorder

        listener = Recorder(warm_up=0)
    monkeypatch.setenv(JOB_DIR, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    mine().open(300.0, os.environ)
    try:
        told = []
        for mark, _ in MARKS:
            listener.on_mark(mark)
            told.append((mark, said(tmp_path).doing))
    finally:
        mine().close()
    assert told == MARKS
    assert said(tmp_path).steps == 1 or said(tmp_path).section is Section.OUTSIDE


def test_stacks_are_written_while_the_interpreter_is_locked(tmp_path: Path) -> None:
    """In a process that computes in C and lets no other thread run."""
    program = (
        "import os, sys\nfrom hora.pulse import Pulse\npage = Pulse()\npage.open(1.0)\nprint(flush=True)\n"
        "def busy():\n    sum(range(10**12))\nbusy()\n"
    )
    environ = os.environ | {JOB_DIR: str(tmp_path), "RANK": "0"}
    with subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert ASK is not None
            while b"in busy" not in stacks_path(tmp_path, 0).read_bytes():
                process.send_signal(ASK)
                assert process.poll() is None
        finally:
            process.kill()


def test_a_signal_that_the_script_uses_is_left_to_it(tmp_path: Path) -> None:
    assert ASK is not None
    heard: list[int] = []
    before = signal.signal(ASK, lambda signum, _: heard.append(signum))
    pulse = Pulse()
    try:
        pulse.open(300.0, {JOB_DIR: str(tmp_path), "RANK": "0"})
        signal.raise_signal(ASK)
        assert heard == [ASK]
        assert not stacks_path(tmp_path, 0).exists()
    finally:
        pulse.close()
        signal.signal(ASK, before)
