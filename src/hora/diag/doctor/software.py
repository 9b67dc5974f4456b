"""Python, PyTorch, what is optional, and what is built on this machine."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import hora
from hora.diag.doctor.finding import Finding, ok, warning, wrong

_PYTHON, _TORCH = (3, 11), (2, 10)
_OPTIONAL = {"matplotlib": "plot", "tensorboard": "tensorboard", "mpi4py": "mpi"}
_STALE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def versions() -> Iterator[Finding]:
    """Of Hora, Python and PyTorch."""
    yield ok("hora", f"{hora.__version__}, {Path(str(hora.__file__)).parent}")
    python = platform.python_version()
    yield (
        ok("python", f"{python}, {sys.executable}")
        if sys.version_info >= _PYTHON
        else wrong("python", python, "Hora needs Python 3.11 or newer")
    )
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield wrong("torch", "is not installed", "pip install torch")
        return
    known = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    yield ok("torch", found) if known >= _TORCH else wrong("torch", found, "Hora needs PyTorch 2.10 or newer: pip install --upgrade torch")


def extras() -> Iterator[Finding]:
    """What some commands want besides."""
    missing = [name for name in _OPTIONAL if not _is_installed(name)]
    there = [name for name in _OPTIONAL if name not in missing]
    words = ", ".join(f"{name} (pip install 'hora[{_OPTIONAL[name]}]')" for name in missing)
    yield ok("optional packages", "; ".join(filter(None, (", ".join(there), words and f"not installed: {words}"))))


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def kernel() -> Iterator[Finding]:
    """The part of the shm backend that is compiled on the machine."""
    from hora.comm.backends.shm.build import load_kernel

    if load_kernel() is not None:
        yield ok("sums in shared memory", "by the compiled kernel")
    elif any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        yield warning(
            "sums in shared memory", "by Python alone: the kernel could not be built, or HORA_SHM_KERNEL=0", "run with -v to see why"
        )
    else:
        yield warning("sums in shared memory", "by Python alone, which is slower: there is no C compiler", "install one (apt install gcc)")


def environment() -> Iterator[Finding]:
    """Variables in this shell that a rank would take for its place in a job."""
    set_here = [name for name in _STALE if name in os.environ]
    if set_here:
        yield warning(
            "variables of a launcher",
            ", ".join(f"{name}={os.environ[name]}" for name in set_here) + " in this shell",
            f"unset {' '.join(set_here)}, unless a launcher has set them: a script started by hand would take them for its place in a job",
        )
