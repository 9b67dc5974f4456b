"""Kills what a job has started, for certain; run as a program, it is the guardian that does so when the launcher is gone.

The guardian is started as `python -I -S reaper.py MARK DIRECTORY...`. It reads from standard input which process groups there are, and whether
the job ended well; when its input ends without that word, the launcher died, and the guardian kills the groups and every process that carries MARK
in its environment, then removes the directories. Relies on the standard library alone, since it runs without Hora on its path.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

GOODBYE = b"goodbye"
"""What the launcher says to the guardian when the job has ended and nothing is left to do."""

_POLL_S = 0.005
_MARKED_S, _GROUPS_S = 2.0, 0.5


def end_processes(groups: Iterable[int], mark: bytes, reap: Callable[[], object] | None = None) -> list[int]:
    """Kills process groups, and processes marked by their environment, and waits a moment until they are gone.

    Args:
        groups: process groups, by the process that leads them.
        mark: `NAME=value` as it stands in the environment; empty where it cannot be looked for, and the groups are all that is killed.
        reap: takes leave of processes that have died, where that is for this process to do. Elsewhere it is the system's, in its own time, and dead
            processes are not waited for if they can be told from living ones: by their mark.

    Returns:
        Processes, or groups, that are still there.
    """
    groups, deadline = set(groups), time.monotonic() + (_MARKED_S if mark else _GROUPS_S)
    while True:
        if reap is not None:
            reap()
        groups = {group for group in groups if kill_group(group)}
        left = [pid for pid in find_strays(mark) if _kill(pid)] if mark else []
        if reap is not None or not mark:
            left += groups
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_S)


def kill_group(group: int, signum: int = signal.SIGKILL) -> bool:
    """Sends a signal to all processes of a group; False if there is none."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def find_strays(mark: bytes) -> Iterator[int]:
    """Processes that were started with `mark` in their environment, those in sessions of their own included."""
    for name in os.listdir("/proc"):
        if name.isdigit() and mark in _environment(name):
            yield int(name)


def _environment(pid: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _watch(groups: set[int]) -> bool:
    """Keeps `groups` up to date with what the launcher says; returns whether it said goodbye."""
    rest = b""
    while data := os.read(0, 4096):
        *words, rest = (rest + data).split(b"\n")
        for word in words:
            if word == GOODBYE:
                return True
            (groups.add if word[:1] == b"+" else groups.discard)(int(word[1:]))
    return False


def main(mark: str, *directories: str) -> None:
    """Guards a job until it has ended, and ends it if the launcher is gone."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    if _watch(groups):
        return
    end_processes(groups, os.fsencode(mark))
    import shutil  # here, because loading it must not delay the guardian's start

    for directory in directories:
        with suppress(OSError):
            shutil.rmtree(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
