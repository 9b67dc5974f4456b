"""Files that appear whole or not at all, for the launcher and the ranks alike. Standard library alone.

Symbolic links are never followed at the last step of a path. Relies on POSIX renames; where directories cannot be synced that step is left out.
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

TEMPORARY: Final = ".tmp-"
"""How the name of everything unfinished begins."""

NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)
"""Flag for `os.open`: a symbolic link at the last step of the path is refused."""

_MAX_LINKS: Final = 40


def write_new(path: Path, chunks: Iterable[memoryview | bytes], *, durable: bool, mode: int = 0o666) -> None:
    """Writes a new file, piece by piece.

    Args:
        path: nothing has that name.
        chunks: the content.
        durable: whether it is to be on the disk when this returns; otherwise it outlives processes, but maybe not the machine.
        mode: of the file, less what the umask takes away.

    Raises:
        FileExistsError: something has that name.
        OSError: the disk is full or fails; what has been written stays.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, mode)
    try:
        for chunk in chunks:
            _write_all(descriptor, memoryview(chunk))
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def replace_with(path: Path, chunks: Iterable[memoryview | bytes], *, durable: bool, mode: int = 0o666) -> None:
    """Puts a file in the place of what is at `path`, which has the old or the new content at every moment.

    A link or a pipe there is replaced, too, and neither followed nor written to.

    Args:
        path: no directory.
        chunks: the content.
        durable: as of `write_new`.
        mode: as of `write_new`.

    Raises:
        OSError: the disk is full or fails, or `path` is a directory; what is there stays.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.urandom(8).hex()}")
    try:
        write_new(temporary, chunks, durable=durable, mode=mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Forces the names in a directory to the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such call for directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def own_descriptor(path: Path) -> int | None:
    """The descriptor of this process that `path` leads to, as `/dev/stdout` does, and what a shell has made of `>(...)`; None if it leads to none."""
    for _ in range(_MAX_LINKS):
        place = path.parent.resolve()
        if path.name.isdecimal() and place == Path(f"/proc/{os.getpid()}/fd"):
            return int(path.name)
        if not path.is_symlink():
            return None
        path = place / path.readlink()
    return None
