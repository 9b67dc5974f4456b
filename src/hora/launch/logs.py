"""Where the ranks' logs of a job go: a directory that the user named, or one of the job's own below the state directory.

Of the latter the newest are kept; those of running jobs stay in any case.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hora import env
from hora.errors import ConfigError
from hora.launch.sinks import RankLog, open_rank_logs

if sys.platform != "win32":
    import fcntl

KEPT_JOBS = 20
"""How many jobs' logs are kept."""

_RUNNING = ".running"


@contextmanager
def log_directory(named: Path | None, job_id: str, *, within: bool = False, word: str = "--log-dir") -> Iterator[Path]:
    """Makes the directory for the logs of a job, and removes the oldest ones of past jobs.

    `named` is the user's, or with `within` one of Hora's own name in the user's; `word` is what names it on the command line.

    Raises:
        ConfigError: it cannot be made or written.
    """
    if named is not None:
        yield _unplanted(named, word) if within else _writable(named, 0o777, word)
        return
    base = env.state_dir() / "logs"
    # Each of its own mode, which `parents` would leave to the umask: the key that lies beside is refused where others can write.
    for made in (base.parent, base):
        _writable(made, mode=0o700)
    path = _writable(base / f"{time.strftime('%Y%m%d-%H%M%S')}-{job_id}", mode=0o700)
    lock = _hold(path / _RUNNING)
    try:
        remove_oldest(base, KEPT_JOBS)
        yield path
    finally:
        (path / _RUNNING).unlink(missing_ok=True)
        os.close(lock)


def open_streams(directory: Path, ranks: Iterable[int], world_size: int) -> dict[tuple[int, int], RankLog]:
    """Files `rank.N/stdout` and `rank.N/stderr` in `directory`, by rank and number of the stream, as Horovod names them; what is there is kept.

    Raises:
        ConfigError: one cannot be made or written, or another job writes it.
    """
    digits = len(str(world_size - 1))
    paths = {
        (rank, number): _unplanted(directory / f"rank.{rank:0{digits}}", "--output-dir") / name
        for rank in ranks
        for number, name in enumerate(("stdout", "stderr"))
    }
    return open_rank_logs(paths, "--output-dir")


def remove_oldest(base: Path, kept: int) -> None:
    """Removes all but the newest `kept` directories in `base`; those of running jobs are spared."""
    for path in sorted(path for path in base.iterdir() if path.is_dir())[:-kept]:
        if not _is_running(path):
            shutil.rmtree(path, ignore_errors=True)


def _unplanted(path: Path, word: str) -> Path:
    """As `_writable`, for a directory whose name the user has not given: a link in its place may have been planted by others."""
    if path.is_symlink():
        raise ConfigError(f"the log directory {path} must not be a symbolic link, but is one; remove it, or name another with {word}")
    return _writable(path, 0o777, word)


def _writable(path: Path, mode: int, word: str = "--log-dir") -> Path:
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the log directory {path} cannot be made: {error.strerror}; name another with {word}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"the log directory {path} must be writable, but is not; name another with {word}")
    return path.absolute()


def _hold(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if sys.platform != "win32":
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _is_running(path: Path) -> bool:
    if sys.platform == "win32":
        return (path / _RUNNING).exists()
    try:
        descriptor = os.open(path / _RUNNING, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # perhaps since a moment ago
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
