"""How output looks on the screen: bytes in, bytes out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.launch.lines import MAX_LINE_BYTES, Hidden, Lines, Live, Shape


def fed(shape: Shape, *pieces: bytes) -> bytes:
    return b"".join(shape.feed(piece, now=0.0) for piece in pieces) + shape.flush()


def test_the_only_rank_passes_through() -> None:
    assert fed(Shape(), b"a\r", b"b", b"\xff\n") == b"a\rb\xff\n"


def test_hidden_output_is_not_shown() -> None:
    assert fed(Hidden(), b"a\n") == b""


def test_each_line_gets_the_prefix() -> None:
    assert fed(Lines(b"[1] "), b"one\ntwo\n") == b"[1] one\n[1] two\n"


def test_a_line_in_pieces_is_shown_when_it_is_whole() -> None:
    shape = Lines(b"[1] ")
    assert shape.feed(b"on", 0.0) == b""
    assert shape.feed(b"e\ntw", 0.0) == b"[1] one\n"


def test_the_last_line_without_an_end_is_ended() -> None:
    assert fed(Lines(b"[1] "), b"no end") == b"[1] no end\n"


def test_empty_lines_are_kept() -> None:
    assert fed(Lines(b"[1] "), b"\n\na\n") == b"[1] \n[1] \n[1] a\n"


def test_windows_line_ends_are_line_ends() -> None:
    assert fed(Lines(b"[1] "), b"a\r\nb\r", b"\nc\r\n") == b"[1] a\n[1] b\n[1] c\n"


@pytest.mark.parametrize(
    "pieces",
    [
        (b"\r 10%", b"\r 20%", b"\r100%\n"),
        (b" 10%\r", b" 20%\r", b"100%\r\n"),
        (b"\r 10%\r 20%\r100%", b"\n"),
        (b"\r 10%\r 20%\r100%\r", b"\n"),
    ],
)
def test_a_progress_bar_is_shown_as_it_last_looked(pieces: tuple[bytes, ...]) -> None:
    assert fed(Lines(b"[1] "), *pieces) == b"[1] 100%\n"


def test_an_unfinished_line_is_shown_after_a_second() -> None:
    shape = Lines(b"[1] ")
    shape.feed(b"loading ...", now=5.0)
    assert shape.due() == 6.0
    assert shape.flush() == b"[1] loading ...\n"
    assert shape.due() is None
    assert shape.feed(b" done\n", now=9.0) == b"[1]  done\n"


def test_the_end_of_a_line_that_was_shown_is_not_shown_as_an_empty_line() -> None:
    shape = Lines(b"[1] ")
    shape.feed(b"\r100%", now=0.0)
    assert shape.flush() == b"[1] 100%\n"
    assert shape.feed(b"\nnext\n", now=1.0) == b"[1] next\n"


def test_waiting_counts_from_the_first_byte_of_the_line() -> None:
    shape = Lines(b"[1] ")
    shape.feed(b"a", now=0.0)
    shape.feed(b"b", now=0.9)
    assert shape.due() == 1.0
    shape.feed(b"\nc", now=0.95)
    assert shape.due() == 1.95


def test_a_progress_bar_is_shown_now_and_then_only() -> None:
    shape = Lines(b"[1] ")
    shape.feed(b"\r10%", now=0.0)
    shape.feed(b"\r20%", now=9.0)
    assert shape.due() == 10.0


def test_a_progress_bar_of_any_length_takes_no_memory() -> None:
    shape = Lines(b"")
    for index in range(100_000):
        assert shape.feed(b"\r%5d" % index, now=0.0) == b""
    assert shape.flush() == b"99999\n"


def test_huge_lines_are_shown_in_bounded_pieces() -> None:
    text = b"x" * (2 * MAX_LINE_BYTES + 5)
    in_one = fed(Lines(b"[1] "), text + b"\n")
    in_many = fed(Lines(b"[1] "), *(text[start : start + 1000] for start in range(0, len(text), 1000)), b"\n")
    for shown in (in_one, in_many):
        assert max(map(len, shown.splitlines())) <= MAX_LINE_BYTES + 4
        assert shown.replace(b"[1] ", b"").replace(b"\n", b"") == text


@given(st.lists(st.binary(max_size=40).map(lambda piece: piece.replace(b"\r", b"")), max_size=20))
def test_nothing_is_lost_however_the_bytes_arrive(pieces: list[bytes]) -> None:
    text = b"".join(pieces)
    shown = fed(Lines(b"P"), *pieces)
    expected = text if text.endswith(b"\n") or not text else text + b"\n"
    assert shown == b"".join(b"P" + line + b"\n" for line in expected.split(b"\n")[:-1])


def test_a_live_rank_is_shown_at_once_with_the_prefix_on_each_line() -> None:
    shape = Live(b"[0] ")
    assert shape.feed(b"a", 0.0) == b"[0] a"
    assert shape.feed(b"b\nc", 0.0) == b"b\n[0] c"
    assert shape.feed(b"\r10%\r", 0.0) == b"\r[0] 10%\r"
    assert shape.feed(b"20%", 0.0) == b"[0] 20%"


@pytest.mark.parametrize(
    ("before", "wipe"),
    [(b"", b""), (b"line\n", b""), (b"text", b"\n"), (b"\r10%", b"\r\x1b[K"), (b"10%\r", b"\r\x1b[K"), (b"\r10%\n", b""), (b"a\r\n", b"")],
)
def test_a_line_of_another_rank_wipes_a_bar_and_keeps_text(before: bytes, wipe: bytes) -> None:
    shape = Live(b"[0] ")
    shape.feed(before, 0.0)
    assert shape.interrupt() == wipe
    assert shape.feed(b"next", 0.0) == b"[0] next"
