"""Looks at the ranks of this node: what they have said (`pulse`), what the kernel says of their processes, and their Python stacks."""

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hora import pulse
from hora.launch.child import on_linux
from hora.launch.local import LocalRanks
from hora.launch.watch import Sight

_UNKNOWN, _STOPPED = "?", "T"
_STACKS_S, _POLL_S = 1.0, 0.1
_MAX_STACKS_BYTES, _MAX_ALL_BYTES = 1 << 15, 400_000  # all travel in one message
_DEBUGGER = re.compile(r'^  File ".*/(?:[pb]db\.py|(?:ipdb|pudb|pydevd|debugpy|IPython)/.*)", line', re.MULTILINE)
_TRACED = re.compile(r"^TracerPid:\s*[1-9]", re.MULTILINE)


class Lookout:
    """Looks at `ranks`, whose private directory is `job_dir`."""

    def __init__(self, ranks: LocalRanks, job_dir: Path) -> None:
        self._ranks = ranks
        self._job_dir = job_dir

    def look(self) -> list[Sight]:
        """What is to be seen of the ranks that live."""
        return [self._look(rank) for rank in self._ranks.alive()]

    def stacks(self, sights: Iterable[Sight]) -> dict[int, str]:
        """The Python stacks of these ranks, of those that tell them; takes a moment."""
        asked = {sight.rank: size for sight in sights if (size := self._ask(sight)) is not None}
        most_bytes = min(_MAX_STACKS_BYTES, _MAX_ALL_BYTES // max(1, len(asked)))
        end, told = time.monotonic() + _STACKS_S, dict.fromkeys(asked, "")
        while time.monotonic() < end:
            time.sleep(_POLL_S)
            before, told = told, {rank: self._read(rank, size, most_bytes) for rank, size in asked.items()}
            if told == before and all(told.values()):
                break
        return told

    def is_debugged(self, sight: Sight, stacks: str) -> bool:
        """Whether somebody looks at a rank with a debugger, from outside or in Python."""
        return _TRACED.search(_read_process(sight.pid, "status")) is not None or _DEBUGGER.search(stacks) is not None

    def _look(self, rank: int) -> Sight:
        words = pulse.read_words(pulse.page_path(self._job_dir, rank))
        # A shell may have been started, and the rank by it.
        pid = words.pid if words is not None else self._ranks.pid(rank)
        return Sight(rank, pid, _state(pid), words)

    def _ask(self, sight: Sight) -> int | None:
        """Asks a rank for its stacks; returns where in its file they will begin, None if it does not tell them."""
        with suppress(OSError):
            size = pulse.stacks_path(self._job_dir, sight.rank).stat().st_size
            if pulse.ASK is not None:
                os.kill(sight.pid, pulse.ASK)
                return size
        return None

    def _read(self, rank: int, begin: int, most_bytes: int) -> str:
        with suppress(OSError), pulse.stacks_path(self._job_dir, rank).open("rb") as file:
            file.seek(begin)
            return file.read(most_bytes).decode(errors="replace")
        return ""


def _state(pid: int) -> str:
    """The letter of a process's state: R runs, S sleeps, D waits in the kernel, T is stopped, t is halted by a debugger."""
    # The name, in parentheses before it, may hold anything.
    state = _read_process(pid, "stat").rpartition(")")[2].strip()[:1] or _UNKNOWN
    # Of a frozen process the kernel says that it waits, or sleeps.
    return _STOPPED if state in "SD" and is_frozen(_read_process(pid, "cgroup")) else state


def is_frozen(cgroup: str, root: Path = Path("/")) -> bool:
    """Whether a process is frozen with its control group; `cgroup` is the kernel's list of its groups."""
    for line in cgroup.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            path, sign = root / "sys/fs/cgroup" / group.lstrip("/") / "cgroup.events", "frozen 1"
        elif "freezer" in controllers.split(","):
            path, sign = root / "sys/fs/cgroup/freezer" / group.lstrip("/") / "freezer.state", "FROZEN"
        else:
            continue
        with suppress(OSError):
            if sign in path.read_text(encoding="ascii").splitlines():
                return True
    return False


def _read_process(pid: int, name: str) -> str:
    if not on_linux():
        return ""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
