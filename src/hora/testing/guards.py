"""Notices what a test leaves behind: variables, threads, child processes, files in the working directory, who listens to the steps."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hora import events

_PATIENCE_S = 2.0
_POLL_S = 0.01

# What pytest and terminals set on their own, torch's compiler when it is first imported, a session while it lasts; files that runs of Python
# leave; helpers that multiprocessing keeps until the process ends.
_IGNORED_VARIABLES = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "COLUMNS",
        "LINES",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "NCCL_HOSTID",
    }
)
# Of a progress bar inside torch's compiler, which ends with the process; of a process group in Python, which end with it.
_IGNORED_THREADS = ("tqdm_monitor", "hora-group")
_IGNORED_FILES = frozenset({"__pycache__", ".pytest_cache"})
_IGNORED_PROCESSES = ("hora.testing.zygote", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
_CHILDREN = Path("/proc/thread-self/children")


@dataclass(frozen=True)
class Guard:
    """What there was before a test."""

    variables: dict[str, str]
    threads: dict[int, str]
    processes: dict[int, str]
    directory: Path
    files: frozenset[str]
    observer: events.Observer

    @classmethod
    def take(cls) -> "Guard":
        """Looks at this process and its working directory."""
        return cls(_variables(), _threads(), _processes(), Path.cwd(), _files(Path.cwd()), events.observer())

    def leaks(self) -> list[str]:
        """What is there now and was not before; threads and processes get a moment to end."""
        found = self._changed_variables()
        found += [f"thread {name}" for name in _settle(_threads, self.threads)]
        found += [f"process {name}" for name in _settle(_processes, self.processes)]
        if Path.cwd() != self.directory:
            found.append(f"working directory {Path.cwd()}, which was {self.directory}")
        if events.observer() is not self.observer and type(events.observer()) is not events.Observer:
            found.append(f"{events.observer()}, who listens to the steps")
        return found + [f"file {self.directory / name}" for name in sorted(_files(self.directory) - self.files)]

    def _changed_variables(self) -> list[str]:
        before, now = self.variables, _variables()
        names = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
        return [f"variable {name} = {now.get(name)!r}, which was {before.get(name)!r}" for name in names]


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _IGNORED_VARIABLES}


def _threads() -> dict[int, str]:
    return {thread.ident or 0: thread.name for thread in threading.enumerate() if not thread.name.startswith(_IGNORED_THREADS)}


def _processes() -> dict[int, str]:
    found: dict[int, str] = {}
    for process in _children():
        try:
            words = " ".join(process.cmdline()) or process.name()
            if process.status() != psutil.STATUS_ZOMBIE and not any(name in words for name in _IGNORED_PROCESSES):
                found[process.pid] = f"{process.pid} ({words[:100]})"
        except psutil.NoSuchProcess:
            continue
    return found


def _children() -> list[psutil.Process]:
    """The children of this process; where Linux lists them, without reading about every process of the machine, which takes milliseconds."""
    if not _CHILDREN.exists():
        return psutil.Process().children()
    processes = []
    for pid in _listed_children():
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


def _listed_children() -> set[int]:
    """Reads the list until it is twice the same: a child or a thread that ends meanwhile can hide another child."""
    last = None
    while True:
        try:
            pids = {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
        except (FileNotFoundError, ProcessLookupError):  # a thread has ended
            continue
        if pids == last:
            return pids
        last = pids


def _files(directory: Path) -> frozenset[str]:
    return frozenset(entry.name for entry in directory.iterdir()) - _IGNORED_FILES


def _settle(look: Callable[[], dict[int, str]], before: dict[int, str]) -> list[str]:
    """The names of those that `look` finds and `before` has not, once they had time to end."""
    end = time.monotonic() + _PATIENCE_S
    while leftover := [name for key, name in look().items() if key not in before]:
        if time.monotonic() > end:
            break
        time.sleep(_POLL_S)
    return leftover
