"""How the output of a rank looks on the screen of the launcher: bytes in, bytes out. Pure.

A shape is fed with what a rank wrote, in pieces of any size, and returns what to show. Bytes are never decoded: text in any encoding passes.
"""

import re

MAX_LINE_BYTES = 1 << 16
"""Longer lines are shown in pieces of this size."""

# A line that stays unfinished is shown after a while: a prompt, or "loading ..." before a hang. A progress bar never finishes its line; now
# and then is enough of it.
_UNFINISHED_S, _REDRAWN_S = 1.0, 10.0

_CLEAR_LINE = b"\r\x1b[K"


class Shape:
    """Turns what one stream of a rank wrote into what is shown: everything at once and unchanged, as the only rank of a job is shown."""

    def feed(self, data: bytes, now: float) -> bytes:  # noqa: ARG002
        """Takes what was written at the time `now`; returns what to show."""
        return data

    def due(self) -> float | None:
        """When something that is held back should be shown; None if nothing is."""
        return None

    def flush(self) -> bytes:
        """Shows what is held back."""
        return b""


class Hidden(Shape):
    """Nothing is shown."""

    def feed(self, data: bytes, now: float) -> bytes:  # noqa: ARG002
        """Nothing."""
        return b""


class Lines(Shape):
    """Whole lines with a prefix, so that lines of several ranks never mix.

    A line that was redrawn with carriage returns, as progress bars do, is shown as it last looked.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""
        self._redrawn = False
        self._since: float | None = None
        self._shown_in_part = False

    def feed(self, data: bytes, now: float) -> bytes:
        """Shows the lines that are finished."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown = b"".join(map(self._line, lines))
        self._drop_overdrawn()
        while len(self._rest) > MAX_LINE_BYTES:
            shown += self._prefix + self._rest[:MAX_LINE_BYTES] + b"\n"
            self._rest = self._rest[MAX_LINE_BYTES:]
        if lines or self._since is None:
            self._since = now
        if not self._rest:
            self._since = None
        return shown

    def due(self) -> float | None:
        """When the unfinished line has waited long enough."""
        if self._since is None:
            return None
        return self._since + (_REDRAWN_S if self._redrawn else _UNFINISHED_S)

    def flush(self) -> bytes:
        """Shows the unfinished line as a line."""
        rest, self._rest, self._since = self._rest, b"", None
        if not rest:
            return b""
        self._shown_in_part = True
        return self._prefix + _last_look(rest) + b"\n"

    def _line(self, line: bytes) -> bytes:
        ends_shown_one, self._shown_in_part, self._redrawn = self._shown_in_part and not line, False, False
        if ends_shown_one:
            return b""
        look = _last_look(line)
        pieces = [look[start : start + MAX_LINE_BYTES] for start in range(0, len(look), MAX_LINE_BYTES)] or [b""]
        return b"".join(self._prefix + piece + b"\n" for piece in pieces)

    def _drop_overdrawn(self) -> None:
        """Keeps the last look of a line that is being redrawn, and a last carriage return, which may be half of a line's end."""
        if b"\r" in self._rest:
            self._redrawn = True
            self._rest = _last_look(self._rest) + (b"\r" if self._rest.endswith(b"\r") else b"")


def _last_look(line: bytes) -> bytes:
    """What a terminal shows of a line that ends here."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Live(Shape):
    """Everything at once, with the prefix at each beginning of a line: for the one rank that may draw on the launcher's terminal."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._at_start = True
        self._clean = True
        self._redrawn = False

    def feed(self, data: bytes, now: float) -> bytes:  # noqa: ARG002
        """Shows everything, prefixed."""
        shown = bytearray()
        for piece in filter(None, re.split(rb"(?<=[\r\n])", data)):
            if self._at_start and piece not in (b"\r", b"\n"):
                shown += self._prefix
            shown += piece
            self._clean, self._at_start = piece.endswith(b"\n"), piece.endswith((b"\n", b"\r"))
            self._redrawn = not self._clean and (self._redrawn or piece.endswith(b"\r"))
        return bytes(shown)

    def interrupt(self) -> bytes:
        """What must be shown before somebody else's line: a bar is wiped (its next redraw brings it back), unfinished text is kept."""
        before = b"" if self._clean else _CLEAR_LINE if self._redrawn else b"\n"
        self._at_start, self._clean, self._redrawn = True, True, False
        return before
