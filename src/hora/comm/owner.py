"""Who left a file behind, and whether that process can still be alive.

A process number alone is used again sooner or later, so an owner is the machine it runs on (host, boot, process namespace), its number
and when it started. Everything is compared, nothing is measured: a changed clock does no harm. Beyond the machine nothing can be known.
"""

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Owner:
    """A process, for as long as it lives.

    Attributes:
        host: name of its host, for messages.
        machine: digest of host, boot and process namespace: process numbers mean the same where it is equal.
        pid: its number there.
        started: when it started, in the unit of the system.
    """

    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> "Owner":
        """This process."""
        return cls(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()) or 0)

    @property
    def token(self) -> str:
        """A word of letters, digits and hyphens that `is_gone` can judge."""
        return f"{self.machine}-{self.pid}-{self.started}"


def is_gone(token: str) -> bool | None:
    """Whether the process with this token has ended; None where that cannot be known: another machine, or no token."""
    machine, *numbers = token.split("-")
    if machine != _machine() or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return None
    pid, started = map(int, numbers)
    return _started(pid) != started


def _started(pid: int) -> int | None:
    """When a process started; None when there is none, or only its exit status is left."""
    try:
        # Field 22 counts ticks since the boot; psutil adds the time of the boot, which moves with the clock.
        # The name may hold blanks, ")", and half a letter.
        state, *fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    except OSError:
        return _started_by_psutil(pid)


def _started_by_psutil(pid: int) -> int | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time())
    except psutil.NoSuchProcess:
        return None


def _machine() -> str:
    text = "\n".join((socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), _namespace()))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
