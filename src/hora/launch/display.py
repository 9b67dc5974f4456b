"""What the launcher shows of each rank, and what the rank's standard output and standard error are connected to.

The first rank of the node has the launcher's terminal, if there is one, through a pseudo-terminal: its libraries see a terminal and draw
their progress bars and colours. All other output goes through pipes and is shown line by line.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from hora import env
from hora.launch import hang_report
from hora.launch.lines import Hidden, Lines, Live, Shape
from hora.launch.logs import open_streams
from hora.launch.output import OutputPump, Source, Stream
from hora.launch.plan import Layout
from hora.launch.sinks import Copied, Log, NoLog, Screen, Sink, open_rank_logs
from hora.log import get_logger
from hora.writing import replace_with

if sys.platform != "win32":
    import fcntl
    import struct
    import termios

TAIL_BYTES = 1 << 16
"""How much of the end of a log is looked at."""

_CATCH_UP_S = 0.1
_SHOW_CURSOR = b"\x1b[?25h"


class Ranks:
    """The output of this node's ranks on its way to `logs`; what else becomes of it `Display` or `Relay` says.

    `on_end` is called from another thread when all has been passed on after `finish`.
    """

    def __init__(self, logs: Mapping[int, Log], on_end: Callable[[], None]) -> None:
        self._logs = logs
        self._pump = OutputPump(on_end)
        self._patience_s = _CATCH_UP_S

    def connect(self, rank: int) -> list[int]:
        """What a rank's standard output and standard error are to be; the caller closes them once the rank has been started."""
        return [self._connect(rank, number) for number in (0, 1)]

    def tail(self, rank: int) -> bytes:
        """The last of what a rank has written so far; without the very last while the screen is too slow to wait for."""
        if not self._pump.catch_up(rank, self._patience_s):
            self._patience_s = 0.0
        return self._logs[rank].tail(TAIL_BYTES)

    def keep(self, report: str) -> None:
        """Keeps the report on a hang with the logs, if these are kept here."""

    def finish(self) -> None:
        """Has the rest shown, now that no rank writes any more."""
        self._pump.finish()

    @property
    def ended(self) -> bool:
        """Whether all has been shown after `finish`."""
        return self._pump.ended

    def close(self) -> None:
        """Closes the logs."""
        self._pump.close()
        for log in self._logs.values():
            log.close()

    def _connect(self, rank: int, number: int) -> int:
        read_end, write_end, sink = self._open(rank, number)
        self._pump.add(Stream(rank, read_end, sink))
        return write_end

    def _open(self, rank: int, number: int) -> tuple[int, int, Sink]:
        """Both ends of what a rank writes to, and where that goes; `number` is 0 for standard output, 1 for standard error."""
        raise NotImplementedError


class Display(Ranks):
    """Shows the output on standard output and standard error (`descriptors`), and logs it in `log_dir`.

    Args:
        remote_ranks: ranks of other nodes whose output comes here too, through sources that are given to `add`.
        output_dir: where the two streams of each rank are kept apart as well, as Horovod does it; None: nowhere.
        log_word: what names `log_dir` on the command line, for advice.

    Raises:
        ConfigError: a log cannot be written, or another job that still runs writes it.
    """

    def __init__(
        self,
        layout: Layout,
        log_dir: Path,
        *,
        quiet: bool,
        on_end: Callable[[], None],
        descriptors: Sequence[int] = (1, 2),
        remote_ranks: Iterable[int] = (),
        output_dir: Path | None = None,
        log_word: str = "--log-dir",
    ) -> None:
        ranks = sorted({*layout.ranks, *remote_ranks})
        with ExitStack() as opened:
            self._own = open_rank_logs({rank: log_dir / f"rank{rank}.log" for rank in ranks}, log_word)
            for log in self._own.values():
                opened.callback(log.close)
            self._kept_apart = {} if output_dir is None else open_streams(output_dir, ranks, layout.world_size)
            opened.pop_all()
        super().__init__(self._own, on_end)
        self._layout = layout
        self._log_dir = log_dir
        self._shown = ranks[:1] if quiet else ranks
        self._lives: list[Live] = []
        self._screens = [Screen(descriptor, self._lives) for descriptor in descriptors]

    def add(self, source: Source) -> None:
        """Takes in output from elsewhere."""
        self._pump.add(source)

    def sink(self, rank: int, number: int) -> Sink:
        """Where output of a rank of another node goes."""
        return Sink(self._log(rank, number), self._shape(rank, live=False), self._screens[number])

    def remark_sink(self, prefix: bytes) -> Sink:
        """Where lines go that are no rank's."""
        return Sink(NoLog(), Lines(prefix), self._screens[1])

    def hold_logs(self, release: ExitStack) -> None:
        """Keeps the logs this job's alone until `release` is closed, though this is closed before."""
        for log in self._own.values():
            log.hold(release)

    def keep(self, report: str) -> None:
        """Writes the report on a hang among the logs; a disk that is full must not keep the job from ending."""
        path = self._log_dir / hang_report.FILE
        try:
            replace_with(path, [report.encode(errors="replace")], durable=False, mode=0o644)
        except OSError as error:
            get_logger().warning("%s cannot be written: %s", path, error.strerror)

    def close(self) -> None:
        """Closes the logs, and shows the cursor, which a rank that was killed may have hidden."""
        super().close()
        for log in self._kept_apart.values():
            log.close()
        for screen in self._screens:
            if self._lives and self._pump.ended and screen.is_terminal:
                screen.show(_SHOW_CURSOR, self._lives[0])

    def _open(self, rank: int, number: int) -> tuple[int, int, Sink]:
        screen = self._screens[number]
        live = rank == self._layout.ranks[0] and screen.is_terminal and not env.portable_only()
        read_end, write_end = _open_terminal(len(self._prefix(rank))) if live else os.pipe()
        return read_end, write_end, Sink(self._log(rank, number), self._shape(rank, live=live), screen)

    def _log(self, rank: int, number: int) -> Log:
        apart = self._kept_apart.get((rank, number))
        return self._logs[rank] if apart is None else Copied(self._logs[rank], apart)

    def _shape(self, rank: int, *, live: bool) -> Shape:
        prefix = self._prefix(rank)
        if rank not in self._shown:
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
