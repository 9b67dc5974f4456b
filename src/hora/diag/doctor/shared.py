"""Does a directory behave as checkpoints and objects of several hosts need it?"""

import fcntl
import os
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hora.diag.doctor.finding import Finding, ok, wrong

PATIENCE_S = 2.0
"""How late a host may see what another one has written."""

_POLL_S = 0.1
_MAX_MARK_CHARS = 200


def shared_directory(directory: Path) -> Iterator[Finding]:
    """Makes, renames, locks and removes a file in `directory`."""
    name, there = "shared directory", directory / f".hora-doctor-{secrets.token_hex(8)}"
    renamed = there.with_suffix(".renamed")
    try:
        descriptor = os.open(there, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, b"hora")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(there, renamed)
        if renamed.read_bytes() != b"hora" or renamed.name not in os.listdir(directory):
            yield wrong(name, f"{directory} loses what was written to it", "use another file system: checkpoints there would be lost")
            return
        yield ok(name, f"{directory} can be written, locked and renamed in")
    except OSError as error:
        yield wrong(name, f"{directory}: {error.strerror}", "make it writable for this user on all hosts, on a file system that has locks")
    finally:
        for path in (there, renamed):
            with suppress(OSError):  # what could not be made, in what is no directory for instance, cannot be removed either
                path.unlink()


@contextmanager
def mark(directory: Path, name: str, text: str) -> Iterator[None]:
    """A file `name` with `text` stands in `directory` inside the `with` block.

    Raises:
        OSError: it cannot be made.
    """
    descriptor = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        yield
    finally:
        (directory / name).unlink(missing_ok=True)


def read_marks(directory: Path, names: Collection[str]) -> dict[str, str]:
    """What stands in the files `names` of `directory`, of those that can be seen within `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while len(found := {name: text for name in names if (text := _read(directory / name))}) < len(names):
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return found


def _read(path: Path) -> str:
    try:
        with open(path, encoding="ascii", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            return file.read(_MAX_MARK_CHARS)
    except (OSError, UnicodeError):
        return ""
