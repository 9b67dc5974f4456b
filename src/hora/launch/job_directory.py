"""The private directory of a job on this node, and the removal of those whose launcher died.

It holds the job's key and socket. The launcher keeps the directory locked for as long as it lives: a directory that can be locked by another
belongs to no one any more (and systemd-tmpfiles, which ages `/tmp`, spares a locked one). Windows has no such locks; nothing is swept there.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hora.errors import ConfigError
from hora.holding import hold

_PREFIX = "hora-job-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{16}")
# A launcher locks its directory right after making it; one that is younger than this may not have come to that yet.
_SETTLED_S = 10.0


def base_directory() -> Path:
    """Where job directories are made: TMPDIR, else `/tmp`."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


def new_name() -> str:
    """A name for the directory of a job that nobody can guess."""
    return _PREFIX + os.urandom(8).hex()


@contextmanager
def job_directory(base: Path, name: str | None = None) -> Iterator[Path]:
    """Makes a directory of mode 0700 in `base`, `name` or another of `new_name`; removes it and what is in it at the end.

    Raises:
        ConfigError: nothing can be made in `base`.
    """
    path = base.absolute() / (name or new_name())
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"the job needs a directory in {base}, but none can be made there: {error.strerror}; set TMPDIR to another place"
        ) from error
    lock = hold(path, directory=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def sweep(base: Path) -> list[Path]:
    """Removes the job directories of this user in `base` whose launcher is dead; returns them."""
    removed = []
    for path in base.glob(_PREFIX + "*"):
        if _NAME.fullmatch(path.name) and _is_ours_and_settled(path) and (lock := hold(path, directory=True)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            removed.append(path)
    return removed


def _is_ours_and_settled(path: Path) -> bool:
    with suppress(OSError):
        status = path.lstat()
        return status.st_uid == os.geteuid() and time.time() - status.st_mtime > _SETTLED_S
    return False
