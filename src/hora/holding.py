"""A file or directory is held by a process for as long as it lives, by a lock of the system's. Standard library alone."""

import os
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl


def hold(path: Path, *, directory: bool = False) -> int | None:
    """A descriptor that holds `path` for as long as it is open; None if another process does, it cannot be opened, or there are no such locks."""
    if sys.platform == "win32":
        return None
    # An exclusive lock of a file on NFS wants one that may be written.
    kind = os.O_RDONLY | os.O_DIRECTORY if directory else os.O_RDWR
    try:
        descriptor = os.open(path, kind | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_held_elsewhere(descriptor: int) -> bool:
    """Holds a file that is open for writing for as long as it, or a duplicate, is open; True if somebody does already, who opened it on his own.

    Where there are no such locks nobody does.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # some network file systems have none
        return False
    return False


def holder(descriptor: int) -> int | None:
    """The process of this machine that holds the file, as `is_held_elsewhere` says of it; None if the system does not tell."""
    status = os.fstat(descriptor)
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF; the process is 0 or -1 where it is of another container or machine.
    pids = [int(words[4]) for words in map(str.split, locks) if words[1:2] == ["FLOCK"] and words[5:6] == [inode]]
    return next((pid for pid in pids if pid > 0), None)
