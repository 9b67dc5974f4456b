"""Does a directory behave as checkpoints and objects of several hosts need it?"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from hora.diag.doctor.finding import Finding, ok, wrong


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
            path.unlink(missing_ok=True)
