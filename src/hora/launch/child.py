"""How the process of a rank is started, and what it does before it becomes what it is to be; the latter on Linux only."""

import ctypes
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hora import env
from hora.launch.plan import RankPlan

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


def start_process(plan: RankPlan, stdout: int, stderr: int) -> "subprocess.Popen[bytes]":
    """Starts the process of a rank, at the head of a session and process group of its own.

    Raises:
        OSError: it cannot be started.
    """
    stdin = None if plan.rank == 0 else subprocess.DEVNULL
    return start_tied(plan.command, plan.cores, env=plan.environ, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=plan.descriptors)


def start_tied(command: Sequence[str], cores: frozenset[int] | None = None, **how: Any) -> "subprocess.Popen[bytes]":
    """Starts a process that ends with this thread, at the head of a session and process group of its own; `how` is for `Popen`.

    Raises:
        OSError: it cannot be started.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; what runs between fork and exec takes no locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(command, start_new_session=True, preexec_fn=preparation(os.getpid(), cores), **how)
