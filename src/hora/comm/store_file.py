"""A file in which ranks meet: what must be known of it before torch opens it.

`FileStore` believes every length that it reads, and reads for ever where the file ends before. A text that is given by mistake, or what a rank
that was killed while it wrote has left, would have the process spin without a deadline.
"""

import fcntl
import os
import stat
import sys
import time
from pathlib import Path
from typing import BinaryIO

from hora.comm.deadline import Deadline
from hora.errors import ConfigError, RendezvousTimeout

_LENGTH_BYTES = 4
_PAUSE_S = 0.01


def require_store(path: Path, deadline: Deadline) -> None:
    """Returns if `path` is absent, empty, or holds what a `FileStore` has written.

    Raises:
        ConfigError: it is something else, or cannot be read.
        RendezvousTimeout: another process has it locked until the deadline.
    """
    try:
        if stat.S_ISREG(path.stat().st_mode):  # a pipe would have the opening wait for who writes into it
            with path.open("rb") as file:
                _lock(file, path, deadline)
                if _is_whole(file):
                    return
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"init_method file://{path} must name a file that can be opened and locked, but: {error.strerror}") from error
    raise ConfigError(
        f"init_method file://{path} must name a file that does not exist yet, for the ranks to meet in, but there is something else, or half of "
        "such a file; name another, or delete it if an earlier job left it"
    )


def _lock(file: BinaryIO, path: Path, deadline: Deadline) -> None:
    """As torch does while it reads and writes, until the file is closed."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if deadline.passed:
                raise RendezvousTimeout(
                    f"another process has locked {path} for {deadline.waited_s:.1f} s; see whether it is stopped"
                ) from error
        else:
            return
        time.sleep(_PAUSE_S)


def _is_whole(file: BinaryIO) -> bool:
    """Whether there are keys and values in turn, each behind its length, and nothing else."""
    size, place, is_key = os.fstat(file.fileno()).st_size, 0, True
    while place < size:
        file.seek(place)
        length = int.from_bytes(file.read(_LENGTH_BYTES), sys.byteorder)
        if is_key and length == 0:
            return False
        place += _LENGTH_BYTES + length
        is_key = not is_key
    return place == size and is_key
