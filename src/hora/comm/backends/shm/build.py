"""Builds the C kernel where there is a compiler, once a machine and version, and loads it.

The library lies in the user's cache directory under the digest of its source, the compiler's options and the processor; where it cannot be
built or kept, the backend works without it (`pure`).
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from hora import env, log

_SOURCE = Path(__file__).with_name("kernel.c")
_OPTIONS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-pthread")
_COMPILERS = ("cc", "gcc", "clang")
_BUILD_S = 60.0


@lru_cache(1)
def load_kernel() -> ctypes.CDLL | None:
    """The kernel, or None: there is no compiler, or HORA_SHM_KERNEL is 0."""
    if os.environ.get(env.SHM_KERNEL, "1") == "0":
        return None
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        log.get_logger().debug("the shm backend works without its C kernel: %s", error)
        return None


def _built() -> Path:
    """The library, built now if it has not been."""
    directory = _cache_directory()
    library = directory / f"shm-{_digest()}.so"
    if not library.exists():
        with _locked(directory):  # the ranks of a host come here together
            if not library.exists():
                _build(library)
    return library


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Inside the `with` block no other process is in one of the same directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(library: Path) -> None:
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError(f"none of {', '.join(_COMPILERS)} is installed")
    # Beside, then renamed: whoever looks without the lock finds a whole library or none.
    handle, beside = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    try:
        subprocess.run([compiler, *_OPTIONS, "-o", beside, str(_SOURCE)], check=True, capture_output=True, timeout=_BUILD_S)
        os.replace(beside, library)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """A directory that nobody else can write to.

    Raises:
        OSError: there is none.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    try:
        directory = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hora"
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} XDG_CACHE_HOME names another directory.") from error
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = directory.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{directory} must be writable by its owner alone, who must be this user")
    return directory


def _digest() -> str:
    """Of all that the library depends on."""
    sha = hashlib.sha256(_SOURCE.read_bytes())
    sha.update(" ".join((*_OPTIONS, platform.machine(), *platform.libc_ver(), _processor())).encode())
    return sha.hexdigest()[:20]


def _processor() -> str:
    """What the processor can do: -march=native makes use of it."""
    with suppress(OSError):
        return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    return ""
