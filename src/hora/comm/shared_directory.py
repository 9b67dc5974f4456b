"""A folder on a disk that all ranks see, in which they leave large objects for each other, and the removal of those that dead jobs left.

Rank 0 makes the folder (mode 0700, an unguessable name) in the directory that the user names, and the others open it; from then on everybody
goes by the open folder, never by its path, so that nobody who can rename it can put another in its place. Files are written beside and
renamed. Whoever reads one knows its size and digest from the writer itself: what lies on the disk is not trusted.

Needs POSIX. Relies on nothing but a file system; knows no tensors and no collectives.
"""

import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from hora import env
from hora.comm.deadline import Deadline
from hora.comm.owner import Owner, is_gone
from hora.errors import ConfigError

PATIENCE_S = 3.0
"""How long a network file system may take to show what another machine has written."""

ABANDONED_S = 7 * 24 * 3600.0
"""From what age a folder is removed of which nobody can say whether its job lives."""

_T = TypeVar("_T")
_POLL_S = 0.05
_NAME = re.compile("hora-objects-[0-9a-f]{32}")
_FILE = re.compile("[0-9a-f]{16}")
_OWNER, _TOKEN = "owner", "token"
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_FILE_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Handle(NamedTuple):
    """What a reader is told of a file."""

    name: str
    size_bytes: int
    digest: str


def choose_shared_dir(asked: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The directory that `hora.init(shared_dir=asked)` means: None leaves it to the launcher (`hora run --shared-dir`).

    Raises:
        ConfigError: it is none, or others may rename what is in it.
    """
    told = asked if asked is not None else environ.get(env.SHARED_DIR) or None
    if told is None:
        return None
    path = Path(told).expanduser().absolute()
    if problem := _problem_of(path):
        raise ConfigError(f"the shared directory must be a directory in which other users cannot rename ours, but {path} {problem}")
    return path


def _problem_of(path: Path) -> str | None:
    if not hasattr(os, "geteuid"):
        return "is on a system without POSIX permissions; leave it out"
    try:
        status = path.lstat()
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return f"is a symbolic link; give {path.resolve()} itself"
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    if status.st_mode & stat.S_IWOTH:
        if status.st_uid not in (0, os.geteuid()):
            return f"may be written by all and belongs to another user ({status.st_uid}); give another one"
        if not status.st_mode & stat.S_ISVTX:
            return "may be written by all; take that right away (chmod o-w), or set the sticky bit (chmod +t)"
    return None if os.access(path, os.W_OK | os.X_OK) else "may not be written; give another one"


class SharedDirectory:
    """What one session knows of the directory in which objects may be left.

    Attributes:
        base: the directory on this rank; None: there is none.
        folder: the job's own folder in it, once all ranks have seen the same.
        settled: whether the ranks have looked.
    """

    def __init__(self, base: Path | None) -> None:
        self.base = base
        self.folder: Folder | None = None
        self.settled = False

    def close(self) -> None:
        """Closes the folder, and removes it where it was made."""
        folder, self.folder = self.folder, None
        if folder is not None:
            folder.close()


class Folder:
    """The open folder of a job. `token` is a word that whoever sees the same folder finds in it."""

    def __init__(self, path: Path, descriptor: int, token: str, lock: int | None = None) -> None:
        self.path = path
        self.token = token
        self._descriptor = descriptor
        self._lock = lock
        self._pid = os.getpid()

    @classmethod
    def make(cls, base: Path) -> Self:
        """Makes a new one in `base`, to be removed by `close`.

        Raises:
            OSError: the disk is full or fails.
        """
        path = base / f"hora-objects-{os.urandom(16).hex()}"
        token = os.urandom(16).hex()
        with ExitStack() as undo:
            path.mkdir(mode=0o700)
            undo.callback(shutil.rmtree, path, ignore_errors=True)
            descriptor = _open_folder(path)
            undo.callback(os.close, descriptor)
            lock = os.open(_OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o600, dir_fd=descriptor)
            undo.callback(os.close, lock)
            os.write(lock, Owner.current().token.encode())
            _try_lock(lock)
            with _new_file(descriptor, _TOKEN) as file:
                os.write(file, token.encode())
            undo.pop_all()
        return cls(path, descriptor, token, lock)

    @classmethod
    def open(cls, base: Path, name: str) -> Self:
        """Opens the one called `name`, which another process has made in `base`.

        Raises:
            ConfigError: `name` is no name of a folder, or others than this user can write in it.
            OSError: it is not there, even after a while.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"the folder of a job must be called hora-objects-..., but is called {name[:80]!r} instead")
        descriptor = _patiently(lambda: _open_folder(base / name))
        try:
            token = _patiently(lambda: _read_token(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return cls(base / name, descriptor, token)

    @contextmanager
    def writing(self) -> Iterator["Writer"]:
        """A new file, which others see when the block ends well, and which is gone when it does not."""
        name = os.urandom(8).hex()
        try:
            with _new_file(self._descriptor, f"{name}.part") as descriptor:
                writer = Writer(name, descriptor)
                yield writer
            os.rename(f"{name}.part", name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self.remove(f"{name}.part")
            raise

    @contextmanager
    def reading(self, handle: Handle) -> Iterator["Reader"]:
        """A file that another rank has written.

        Raises:
            OSError: it is not there, has another size or is no file of this user's, even after a while; or its content is not what was written.
        """
        if not _FILE.fullmatch(handle.name):
            raise OSError(f"a file of ours cannot be called {handle.name[:80]!r}")
        descriptor = _patiently(lambda: _open_file(self._descriptor, handle))
        try:
            reader = Reader(descriptor)
            yield reader
            if reader.digest != handle.digest:
                raise OSError(f"its digest must be {handle.digest}, but is {reader.digest} instead: it was changed or damaged")
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Removes a file if it is there."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)

    def close(self) -> None:
        """Closes the folder; the process that has made it removes it and what is in it."""
        if self._lock is not None and self._pid == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
        for descriptor in (self._descriptor, self._lock):
            if descriptor is not None:
                os.close(descriptor)


class Writer:
    """Writes a file and takes its digest."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self._sha = hashlib.sha256()
        self._size_bytes = 0

    def write(self, content: memoryview) -> None:
        """Appends `content`."""
        self._sha.update(content)
        self._size_bytes += len(content)
        while content:
            content = content[os.write(self._descriptor, content) :]

    @property
    def handle(self) -> Handle:
        """What readers must know."""
        return Handle(self._name, self._size_bytes, self._sha.hexdigest())


class Reader:
    """Reads a file and takes its digest."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sha = hashlib.sha256()

    def fill(self, target: memoryview) -> None:
        """Overwrites `target` with the bytes that follow.

        Raises:
            OSError: there are not so many.
        """
        rest = target
        while rest:
            count = os.readv(self._descriptor, [rest])
            if not count:
                raise OSError("it ends too early")
            rest = rest[count:]
        self._sha.update(target)

    @property
    def digest(self) -> str:
        """Of all that was read."""
        return self._sha.hexdigest()


def sweep(base: Path) -> list[Path]:
    """Removes the folders of this user in `base` whose jobs are dead; returns them.

    A job is dead if its rank 0 ran on this machine and has ended. Of one that ran elsewhere nobody can know: its folder goes when it is a week
    old and nobody holds its lock.
    """
    removed = []
    with suppress(OSError):  # whoever may not list the directory has no old folders to remove
        for path in base.glob("hora-objects-*"):
            if _NAME.fullmatch(path.name) and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_abandoned(path: Path) -> bool:
    try:
        descriptor = _open_folder(path)
    except (ConfigError, OSError):
        return False
    try:
        gone = is_gone(_read_file(descriptor, _OWNER))
        old = time.time() - os.fstat(descriptor).st_mtime > ABANDONED_S
        return gone if gone is not None else old and _is_free(descriptor)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Whether nobody holds the lock of a folder; where that cannot be asked, somebody may."""
    try:
        lock = os.open(_OWNER, os.O_RDWR | _FILE_FLAGS, dir_fd=descriptor)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        return _try_lock(lock)
    finally:
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or this file system has no locks
        return False
    return True


def _open_folder(path: Path) -> int:
    descriptor = os.open(path, _FOLDER_FLAGS)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(descriptor)
        raise ConfigError(
            f"the folder of a job must be its user's alone (mode 0700), but {path} has mode {stat.S_IMODE(status.st_mode):04o} and belongs to user "
            f"{status.st_uid}"
        )
    return descriptor


@contextmanager
def _new_file(folder: int, name: str) -> Iterator[int]:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_file(folder: int, handle: Handle) -> int:
    descriptor = os.open(handle.name, os.O_RDONLY | _FILE_FLAGS, dir_fd=folder)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != handle.size_bytes:
        os.close(descriptor)
        raise OSError(f"it must be a file of {handle.size_bytes} bytes of this user, but has {status.st_size} of user {status.st_uid}")
    return descriptor


def _read_file(folder: int, name: str) -> str:
    """A short text; empty where there is none."""
    try:
        descriptor = os.open(name, os.O_RDONLY | _FILE_FLAGS, dir_fd=folder)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 1000).decode(errors="replace")
    finally:
        os.close(descriptor)


def _read_token(folder: int) -> str:
    if not (token := _read_file(folder, _TOKEN)):
        raise FileNotFoundError("there is no token in it")
    return token


def _patiently(look: Callable[[], _T]) -> _T:
    """What `look` gives, after a while if need be."""
    deadline = Deadline(PATIENCE_S)
    while True:
        try:
            return look()
        except OSError:
            if deadline.passed:
                raise
            time.sleep(_POLL_S)
