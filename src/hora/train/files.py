"""Files that appear whole or not at all, and are on the disk when the call returns, by what `hora.writing` does.

Symbolic links are never followed at the last step of a path.
"""

import errno
import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Final

from hora.comm.owner import Owner
from hora.errors import ConfigError
from hora.writing import NO_FOLLOW, TEMPORARY, own_descriptor, replace_with, sync_directory, write_new

_NO_WAIT: Final = getattr(os, "O_NONBLOCK", 0)


_OF_OTHERS: Final = frozenset(
    (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EBADF, errno.EINVAL, errno.EMFILE)
)


def is_of_the_disk(error: OSError) -> bool:
    """Whether the disk refused what it may take later: full, failing, read-only, out of reach.

    Not so where a name is taken, gone or of another kind, which is somebody else's doing, or where this process has made a mistake.
    """
    return error.errno not in _OF_OTHERS


def write_file(path: Path, chunks: Iterable[memoryview | bytes]) -> tuple[int, str]:
    """Writes a new file and forces it to the disk; returns its size in bytes and its SHA-256.

    Raises:
        FileExistsError: something has that name.
        OSError: the disk is full or fails.
    """
    digest, size_bytes = hashlib.sha256(), 0

    def counted() -> Iterator[memoryview | bytes]:
        nonlocal size_bytes
        for chunk in chunks:
            digest.update(chunk)
            size_bytes += len(chunk)
            yield chunk

    write_new(path, counted(), durable=True)
    return size_bytes, digest.hexdigest()


def create_file(path: Path, chunks: Iterable[memoryview | bytes]) -> None:
    """Makes a file where there is none: it appears whole or not at all.

    Raises:
        FileExistsError: something has that name, perhaps since a moment ago.
        OSError: the disk is full or fails.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{Owner.current().token}")
    temporary.unlink(missing_ok=True)
    try:
        write_file(temporary, chunks)
        _rename_to_new(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _rename_to_new(path: Path, new: Path) -> None:
    try:
        # A rename would replace what is there.
        new.hardlink_to(path)
    except FileExistsError:
        raise
    except OSError:  # some file systems know no hard links
        if new.exists() or new.is_symlink():
            raise FileExistsError(errno.EEXIST, "File exists", str(new)) from None
        path.rename(new)


def replace_file(path: Path, content: bytes) -> None:
    """Puts `content` in the place of the file at `path`, which has the old or the new content at every moment.

    What is no file, such as `/dev/null` or a pipe, is written to and stays.

    Raises:
        OSError: the disk is full or fails, or `path` is a directory.
    """
    if path.exists() and not path.is_symlink() and not path.is_file():
        path.write_bytes(content)
        return
    replace_with(path, [content], durable=True)


def write_result(path: Path, content: bytes) -> None:
    """As `replace_file`, of a file that the user has named; what leads to a descriptor of this process, as `/dev/stdout` does, is written to.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        if (descriptor := own_descriptor(path)) is None:
            replace_file(path, content)
        else:
            sys.stdout.flush()  # what was said before comes before
            with open(descriptor, "wb", closefd=False) as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; name a file in a directory that exists and may be written"
        ) from error


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Opens a file for reading inside the `with` block and refuses what is no regular file: a link, a directory, a pipe.

    Raises:
        OSError: it is none, or cannot be opened.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NO_FOLLOW | _NO_WAIT)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        yield file
