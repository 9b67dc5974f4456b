"""A lock file that says who works in a directory, so that two jobs never do.

The file is made with O_EXCL and names its owner; when the owner has died on this machine the next one takes the lock over, otherwise it is
refused and told whom it met. An owner on another machine cannot be judged and counts as alive, unless it is of an earlier generation of the same
job: the launcher begins one when nothing of the one before is left, or its host is lost, and then nobody would ever remove the lock. Nor does an
owner count that has the name of this host, and has let go of the file: the machine has been started anew since, or the container. Hosts of one name
are told apart by that alone, so that they need a file system whose locks reach from one to the other, as those of NFS do.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from hora import env, log
from hora.comm.owner import Owner, is_gone
from hora.errors import ConfigError
from hora.holding import hold
from hora.train.files import write_file

_GUARD_S: Final = 10.0


class DirectoryLock:
    """Holds `directory` for this process from `acquire` to `release`; a context manager does both."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "lock"
        self._owner: Owner | None = None
        self._held: int | None = None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            ConfigError: a process that may be alive has it; the message names that process.
            OSError: the lock file cannot be written.
        """
        owner = Owner.current()
        job = env.JobEnv.read()
        started = {"job": job.job_id, "generation": job.generation, "held": True}
        content = json.dumps({"host": owner.host, "pid": owner.pid, "token": owner.token, **started}).encode()
        with _guard(self._directory):
            self._remove_if_stale()
            write_file(self._path, [content])
            self._held = hold(self._path)
        self._owner = owner

    def release(self) -> None:
        """Gives the lock back; does nothing in a process that does not have it, such as a fork of the one that has.

        Where the disk refuses that is a warning, which hides no error before it: the next job finds that the owner is gone.
        """
        owner, self._owner = self._owner, None
        if owner == Owner.current():
            try:
                self._remove_if_of(owner)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.get_logger().warning("the lock %s could not be removed: %s", self._path, error)
            if self._held is not None:
                os.close(self._held)
                self._held = None

    def _remove_if_of(self, owner: Owner) -> None:
        with _guard(self._directory):
            if _parse(self._path.read_bytes()).get("token") == owner.token:
                self._path.unlink()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _remove_if_stale(self) -> None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        holder = _parse(content)
        gone = is_gone(str(holder.get("token", "")))
        if gone is None:
            gone = _is_of_an_earlier_generation(holder) or self._has_let_go(holder)
        if not gone:
            raise ConfigError(
                f"only one job may work in {self._directory}, but process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')} "
                f"does already; wait for it or choose another directory (if that process is surely gone, remove {self._path})"
            )
        self._path.unlink()

    def _has_let_go(self, holder: Mapping[str, Any]) -> bool:
        """Whether a holder that has the name of this host holds the file no more: the system lets go of it for a process that dies."""
        if holder.get("held") is not True or holder.get("host") != Owner.current().host:
            return False
        descriptor = hold(self._path)
        if descriptor is None:
            return False
        os.close(descriptor)
        return True


def _is_of_an_earlier_generation(holder: Mapping[str, Any]) -> bool:
    job, generation = env.JobEnv.read(), holder.get("generation")
    return job.job_id is not None and holder.get("job") == job.job_id and isinstance(generation, int) and generation < job.generation


def _parse(content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


@contextmanager
def _guard(directory: Path) -> Iterator[None]:
    """Keeps other processes of this machine from judging the same lock at the same time: two would both find it stale.

    The system gives the guard back when a process dies.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except PermissionError:
        # Windows opens no directories; there O_EXCL alone decides.
        yield
        return
    try:
        _flock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _flock(descriptor: int, directory: Path) -> None:
    import fcntl

    deadline = time.monotonic() + _GUARD_S
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            # This file system has no such locks; O_EXCL alone decides.
            return None
    raise ConfigError(f"{directory} has been kept busy by other jobs for {_GUARD_S:.0f} s; choose another directory")
