"""What the launcher shows of each rank, and what the rank's standard output and standard error are connected to.

The first rank of the node has the launcher's terminal, if there is one, through a pseudo-terminal: its libraries see a terminal and draw
their progress bars and colours. All other output goes through pipes and is shown line by line.
"""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hora import env
from hora.launch.lines import Hidden, Lines, Live, Shape
from hora.launch.output import OutputPump, RankLog, Screen, Stream
from hora.launch.plan import Layout

if sys.platform != "win32":
    import fcntl
    import struct
    import termios

TAIL_BYTES = 1 << 16
"""How much of the end of a log is looked at."""

_CATCH_UP_S = 0.1
_SHOW_CURSOR = b"\x1b[?25h"


class Display:
    """The output of this node's ranks: logged in `log_dir`, shown on standard output and standard error (`descriptors`).

    `on_end` is called from another thread when all has been shown after `finish`.
    """

    def __init__(
        self, layout: Layout, log_dir: Path, *, quiet: bool, on_end: Callable[[], None], descriptors: Sequence[int] = (1, 2)
    ) -> None:
        self._layout = layout
        self._quiet = quiet
        self._logs = {rank: RankLog(log_dir / f"rank{rank}.log") for rank in layout.ranks}
        self._lives: list[Live] = []
        self._screens = [Screen(descriptor, self._lives) for descriptor in descriptors]
        self._pump = OutputPump(on_end)
        self._patience_s = _CATCH_UP_S

    def connect(self, rank: int) -> list[int]:
        """What a rank's standard output and standard error are to be; the caller closes them once the rank has been started."""
        return [self._connect(rank, screen) for screen in self._screens]

    def log_path(self, rank: int) -> Path:
        """The log of a rank."""
        return self._logs[rank].path

    def tail(self, rank: int) -> bytes:
        """The last of what a rank has written so far; without the very last while the screen is too slow to wait for."""
        if not self._pump.catch_up(rank, self._patience_s):
            self._patience_s = 0.0
        return self._logs[rank].tail(TAIL_BYTES)

    def finish(self) -> None:
        """Has the rest shown, now that no rank writes any more."""
        self._pump.finish()

    @property
    def ended(self) -> bool:
        """Whether all has been shown after `finish`."""
        return self._pump.ended

    def close(self) -> None:
        """Closes the logs, and shows the cursor, which a rank that was killed may have hidden."""
        self._pump.close()
        for log in self._logs.values():
            log.close()
        for screen in self._screens:
            if self._lives and self._pump.ended and screen.is_terminal:
                screen.show(_SHOW_CURSOR, self._lives[0])

    def _connect(self, rank: int, screen: Screen) -> int:
        live = rank == self._layout.ranks[0] and screen.is_terminal and not env.portable_only()
        prefix = self._prefix(rank)
        read_end, write_end = _open_terminal(len(prefix)) if live else os.pipe()
        self._pump.add(Stream(rank, read_end, self._logs[rank], self._shape(rank, prefix, live=live), screen))
        return write_end

    def _shape(self, rank: int, prefix: bytes, *, live: bool) -> Shape:
        if self._quiet and rank != self._layout.ranks[0]:
            return Hidden()
        if not prefix:
            return Shape()
        if not live:
            return Lines(prefix)
        self._lives.append(Live(prefix))
        return self._lives[-1]

    def _prefix(self, rank: int) -> bytes:
        if self._layout.world_size == 1:
            return b""
        return b"[%*d] " % (len(str(self._layout.world_size - 1)), rank)


def _open_terminal(indent: int) -> tuple[int, int]:
    """A pseudo-terminal as wide as the launcher's less `indent`, which changes nothing of what is written."""
    read_end, write_end = os.openpty()
    attributes = termios.tcgetattr(write_end)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(write_end, termios.TCSANOW, attributes)
    size = shutil.get_terminal_size()
    fcntl.ioctl(write_end, termios.TIOCSWINSZ, struct.pack("4H", size.lines, max(20, size.columns - indent), 0, 0))
    return read_end, write_end
