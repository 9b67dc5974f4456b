"""Cores, memory, room for files and shared memory."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from hora import env
from hora.diag.doctor.finding import Finding, ok, warning, wrong
from hora.launch.host import count_cores, count_memory_kills

_GIB = 2**30
_LITTLE_MEMORY = 2 * _GIB
_LITTLE_SHM = 2**28
_FEW_FILES = 4096
_LITTLE_DISK = 5 * _GIB


def cores() -> Iterator[Finding]:
    """Those that this process may use."""
    usable, there = count_cores(), os.cpu_count() or 1
    yield ok("cores", f"{usable} of {there} for this process" if usable < there else f"{usable}")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > usable:
        yield warning(
            "threads",
            f"OMP_NUM_THREADS={threads}, but there are {usable} cores",
            "unset it: hora run gives each rank its share of the cores",
        )


def memory() -> Iterator[Finding]:
    """What is free, and whether the kernel has had to kill."""
    there = psutil.virtual_memory()
    found = f"{there.available / _GIB:.1f} GiB of {there.total / _GIB:.1f} GiB are free"
    yield (
        ok("memory", found)
        if there.available >= _LITTLE_MEMORY
        else warning("memory", found, "end other programs, or start fewer ranks: each needs about 0.4 GiB before the model")
    )
    if kills := count_memory_kills():
        yield warning(
            "killed for memory",
            f"{kills} processes of this control group so far",
            "raise its limit (docker run --memory), or start fewer ranks",
        )


def open_files() -> Iterator[Finding]:
    """How many this user may have open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_say_limit(soft)}, at most {_say_limit(hard)}"
    few = hard != resource.RLIM_INFINITY and hard < _FEW_FILES
    yield warning("open files", found, f"ulimit -Hn {_FEW_FILES}, or LimitNOFILE= of the service") if few else ok("open files", found)


def _say_limit(number: int) -> str:
    import resource

    return "no limit" if number == resource.RLIM_INFINITY else f"{number:,}"


def shared_memory(directory: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Where data workers of torch leave their batches; Hora's own sums do without."""
    if not directory.is_dir():
        yield warning("/dev/shm", "is not there", "mount it (tmpfs): data workers of torch hand their batches over through it")
        return
    usage = shutil.disk_usage(directory)
    found = f"{usage.free / _GIB:.2f} GiB of {usage.total / _GIB:.2f} GiB are free"
    yield (
        ok("/dev/shm", found)
        if usage.free >= _LITTLE_SHM
        else warning(
            "/dev/shm",
            found,
            "docker run --shm-size=8g (or --ipc=host); until then num_workers=0 in data loaders, or few and small batches",
        )
    )


def directories() -> Iterator[Finding]:
    """Where logs, keys and what is built are kept, and where jobs have theirs."""
    state = Path(os.environ.get(env.STATE_DIR) or Path.home() / ".local/state/hora")
    for name, directory in (("state directory", state), ("temporary directory", Path(tempfile.gettempdir()))):
        problem = _problem_with(directory)
        if problem is not None:
            yield wrong(name, f"{directory}: {problem}", f"make it writable, or name another one ({env.STATE_DIR}= or TMPDIR=)")
            continue
        free = shutil.disk_usage(_nearest(directory)).free
        found = f"{directory}, {free / _GIB:.1f} GiB free"
        yield ok(name, found) if free >= _LITTLE_DISK else warning(name, found, "make room: logs and checkpoints may not fit")


def _nearest(directory: Path) -> Path:
    return next(parent for parent in (directory, *directory.parents) if parent.exists())


def _problem_with(directory: Path) -> str | None:
    """Why no file can be made there."""
    try:
        with tempfile.TemporaryFile(dir=_nearest(directory)):
            return None
    except OSError as error:
        return error.strerror or str(error)
