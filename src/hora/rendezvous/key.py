"""The secret that the processes of one job share, and the files that hold it.

A key travels as a file that its owner alone can read, never as an argument or a variable. No function here puts a key, or what a key file
contains, into an error. Relies on the file system's owners and modes; where a platform has none (Windows) the directory's own
protection is all there is.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from hora import env
from hora.errors import LaunchError
from hora.writing import NO_FOLLOW, write_new

KEY_BYTES = 32

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


def new_key() -> bytes:
    """A fresh random key of 32 bytes."""
    return os.urandom(KEY_BYTES)


def write_key(path: str | os.PathLike[str], key: bytes) -> None:
    """Makes the file `path` (mode 0600) with `key` in it; it appears whole or not at all.

    Raises:
        FileExistsError: something is at `path` already, a link included; it is left as it is.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        write_new(draft, [f"{key.hex()}\n".encode("ascii")], durable=True, mode=0o600)
        # A hard link, unlike a rename, fails when the name is taken, so that two writers never end with two keys.
        os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The key in the file `path`.

    Raises:
        LaunchError: the file is absent, is a link or no regular file, belongs to another user, can be read or written by others, or
            holds no key.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW | _CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise LaunchError(
            f"the key file {os.fspath(path)} must be a regular file of yours, but cannot be opened: {error.strerror}; start with `hora run`, "
            "or copy the key file of the first node here"
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        _refuse_exposed(path, os.fstat(descriptor))
        return _parse(path, file.read(4 * KEY_BYTES))


def user_key() -> bytes:
    """The user's own key, the same in all jobs of this user on this machine; made when it is first asked for.

    It is the file `key` in the state directory (`HORA_STATE_DIR`, by default `~/.local/state/hora`). Processes that ask at the same time
    get the same key.

    Raises:
        LaunchError: the state directory can be written by others, or not at all, or the file is not private.
    """
    path = env.state_dir() / "key"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(path.parent)
        if not os.path.lexists(path):
            with suppress(FileExistsError):
                write_key(path, new_key())
    except OSError as error:
        raise LaunchError(
            f"the user's key cannot be made at {path}: {error.strerror}; make that possible, or name a directory of yours in {env.STATE_DIR}"
        ) from error
    return read_key(path)


def _refuse_exposed(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise LaunchError(f"the key file {os.fspath(path)} must be a regular file, but is none")
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid != os.geteuid():
        raise LaunchError(
            f"the key file {os.fspath(path)} must belong to user {os.geteuid()}, but belongs to {status.st_uid} instead; make one of your own"
        )
    if status.st_mode & 0o077:
        raise LaunchError(
            f"the key file {os.fspath(path)} must be readable by its owner alone, but has mode {stat.S_IMODE(status.st_mode):04o}; whoever could "
            "read it knows the key, so remove it and let a new one be made"
        )


def _refuse_shared(directory: Path) -> None:
    mode = directory.stat().st_mode
    if hasattr(os, "geteuid") and mode & 0o022:
        raise LaunchError(
            f"the state directory {directory} must be writable by its owner alone, but has mode {stat.S_IMODE(mode):04o}; "
            f"run `chmod go-w {directory}`, or name another in {env.STATE_DIR}"
        )


def _parse(path: str | os.PathLike[str], content: bytes) -> bytes:
    try:
        key = bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        # Without the cause: its text could quote what the file holds.
        raise LaunchError(
            f"the key file {os.fspath(path)} must hold {2 * KEY_BYTES} hexadecimal digits, but does not; remove it and let a new one be made"
        ) from None
    return key
