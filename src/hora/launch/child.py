"""What a process that is started here does before it becomes what it is to be. Linux only; elsewhere nothing."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from hora import env

_PR_SET_PDEATHSIG = 1


def on_linux() -> bool:
    """Whether what only Linux has may be used."""
    return sys.platform == "linux" and not env.portable_only()


def preparation(parent: int, cores: frozenset[int] | None = None) -> Callable[[], None] | None:
    """For the `preexec_fn` of a process that `parent`, this process, starts.

    The new process asks the kernel to kill it when the thread that forked it ends, and binds itself to `cores`, if there are any.
    """
    if not on_linux():
        return None
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signal.SIGKILL)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare
