"""The output of ranks on its way to logs and screen, without ranks."""

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.launch.display import Display
from hora.launch.plan import Layout
from hora.launch.sinks import RankLog


@pytest.fixture
def ended() -> threading.Event:
    return threading.Event()


@pytest.fixture
def display(tmp_path: Path, ended: threading.Event) -> Iterator[Display]:
    """A display of two ranks whose screens are files."""
    screens = [os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in ("out", "err")]
    display = Display(Layout.even(1, 0, 2), tmp_path, quiet=False, on_end=ended.set, descriptors=screens)
    yield display
    if not ended.is_set():
        display.finish()
        assert ended.wait(20)
    display.close()
    for screen in screens:
        os.close(screen)


def test_the_tail_holds_what_a_rank_wrote_last(display: Display) -> None:
    """However little time the thread had to read it."""
    out, err = display.connect(1)
    for index in range(200):
        line = b"line %d\n" % index
        os.write(out, line)
        assert display.tail(1).endswith(line)
    os.close(out)
    os.close(err)


def test_the_tail_is_of_this_job(tmp_path: Path, display: Display) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "rank0.log").write_text("Traceback of an earlier job\n")
    later = Display(Layout.even(1, 0, 1), tmp_path / "old", quiet=False, on_end=lambda: None)
    assert later.tail(0) == b""
    later.finish()
    while not later.ended:
        pass
    later.close()
    assert (tmp_path / "old" / "rank0.log").read_text() == "Traceback of an earlier job\n"


@pytest.mark.parametrize("taken", ["rank1.log", "out/rank.1/stderr"])
def test_logs_that_another_job_writes_are_refused_and_none_is_kept_open(tmp_path: Path, taken: str) -> None:
    for name in ("rank.0", "rank.1"):
        (tmp_path / "out" / name).mkdir(parents=True)
    others = RankLog(tmp_path / taken)
    others.write(b"theirs\n")
    asked = {"quiet": False, "on_end": lambda: None, "output_dir": tmp_path / "out", "log_word": "--run-dir"}
    words = "--output-dir" if "out" in taken else "--run-dir"
    who = rf" \(process {os.getpid()} on this machine\)" if Path("/proc/locks").exists() else ""
    said = f"{taken} must be written by one job at a time, .* still runs{who} writes it; .* name another directory with {words}"
    with pytest.raises(ConfigError, match=said):
        Display(Layout.even(1, 0, 2), tmp_path, **asked)
    assert (tmp_path / taken).read_bytes() == b"theirs\n"
    for name in ("rank0.log", "out/rank.0/stdout"):
        RankLog(tmp_path / name).close()
    others.close()
    RankLog(tmp_path / taken).close()


def test_what_is_there_at_the_end_is_shown(tmp_path: Path, display: Display, ended: threading.Event) -> None:
    """A process that nobody could kill may keep a stream open."""
    out, err = display.connect(0)
    os.write(out, b"last words")
    display.finish()
    assert ended.wait(20)
    assert display.ended
    assert (tmp_path / "out").read_bytes() == b"[0] last words\n"
    os.close(out)
    os.close(err)


def test_streams_go_to_their_screens_and_one_log(tmp_path: Path, display: Display) -> None:
    out, err = display.connect(0)
    os.write(out, b"to out\n")
    display.tail(0)
    os.write(err, b"to err\n")
    assert display.tail(0) == b"to out\nto err\n"
    assert (tmp_path / "out").read_bytes() == b"[0] to out\n"
    assert (tmp_path / "err").read_bytes() == b"[0] to err\n"
    assert (tmp_path / "rank0.log").read_bytes() == b"to out\nto err\n"
    os.close(out)
    os.close(err)


def test_an_unfinished_line_is_shown_after_a_while(tmp_path: Path, display: Display) -> None:
    out, err = display.connect(0)
    os.write(out, b"loading ...")
    while not (tmp_path / "out").read_bytes():
        pass
    assert (tmp_path / "out").read_bytes() == b"[0] loading ...\n"
    os.close(out)
    os.close(err)


@pytest.mark.parametrize(("world_size", "prefix"), [(2, b"[1] "), (10, b"[1] "), (11, b"[ 1] "), (101, b"[  1] ")])
def test_prefixes_of_a_job_are_of_one_width(tmp_path: Path, world_size: int, prefix: bytes) -> None:
    screen = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    ended = threading.Event()
    display = Display(Layout.even(1, 0, world_size), tmp_path, quiet=False, on_end=ended.set, descriptors=(screen, screen))
    out, err = display.connect(1)
    os.write(out, b"x\n")
    display.finish()
    assert ended.wait(20)
    display.close()
    assert (tmp_path / "out").read_bytes() == prefix + b"x\n"
    for descriptor in (out, err, screen):
        os.close(descriptor)


def test_a_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").mkdir()
    with pytest.raises(ConfigError, match="rank0.log cannot be opened: Is a directory; name another directory with --log-dir"):
        Display(Layout.even(1, 0, 1), tmp_path, quiet=False, on_end=lambda: None)


def test_a_thread_that_the_screen_holds_does_not_hold_those_who_ask(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    ended = threading.Event()
    display = Display(Layout.even(1, 0, 1), tmp_path, quiet=False, on_end=ended.set, descriptors=(writer, writer))
    out, err = display.connect(0)
    feeder = threading.Thread(target=os.write, args=(out, b"x" * 300_000))
    feeder.start()
    while not select.select([reader], [], [], 0)[0]:
        pass
    for _ in range(2000):
        display.tail(0)
    shown = b""
    while len(shown) < 300_000:
        shown += os.read(reader, 1 << 16)
    feeder.join()
    display.finish()
    assert ended.wait(20)
    display.close()
    for descriptor in (out, err, reader, writer):
        os.close(descriptor)


def test_a_report_takes_the_place_of_what_others_have_planted_and_is_written_by_nobody_else(tmp_path: Path, display: Display) -> None:
    os.mkfifo(tmp_path / "hang-report.txt")
    before = os.umask(0)
    try:
        display.keep("stuck\udcff\n")  # what a program was called may be no text
    finally:
        os.umask(before)
    assert (tmp_path / "hang-report.txt").read_bytes() == b"stuck?\n"
    assert (tmp_path / "hang-report.txt").lstat().st_mode & 0o777 == 0o644
    assert list(tmp_path.glob(".*")) == []
