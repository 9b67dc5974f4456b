"""What a spare does, in its own process: loads what ranks load, and waits until the launcher tells it to be a rank.

Runs while the interpreter starts (`spare_hook`), which goes on to the rank's script when `serve` returns. Launcher and spare share a socket, which
says in this order: `LOAD`; `READY` in answer; the variables that were not known before, as JSON, along with the descriptors of standard output and
standard error. When the socket ends first, so does the spare. Loads torch by name: no module of the launcher imports it.
"""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hora import env
from hora.loading import load

LOAD, READY = b"load", b"ready"

MODULES = ("torch", "torch._dynamo", "hora.comm.session", "hora.sync.optimizer", "hora.train.checkpoint.checkpointer")
"""What takes long to load in nearly every rank; making an optimizer loads the second."""

# Beside ranks that take all cores a tenth of one is left for it; at 19 it would be a hundredth.
_BEHIND = 10
_OOM, _FIRST = "/proc/self/oom_score_adj", "1000"
_MOST_BYTES = 1 << 16


def serve() -> None:
    """Returns when this process is to be a rank; ends it when the launcher has no use for it."""
    descriptor = os.environ.pop(env.SPARE, None)
    if descriptor is None:
        return  # a process that something has started that a spare has loaded
    os.set_inheritable(int(descriptor), False)
    with socket.socket(fileno=int(descriptor)) as launcher:
        if launcher.recv(len(LOAD)) != LOAD:
            os._exit(0)
        with _first_to_go():
            with _in_background():
                _load()
            launcher.send(READY)
            _await_part(launcher)


def _load() -> None:
    for name in MODULES:
        with suppress(Exception):  # the script will meet it, if it needs the module
            load(name)


def _await_part(launcher: socket.socket) -> None:
    told, descriptors, _, _ = socket.recv_fds(launcher, _MOST_BYTES, 2)
    if not told:
        os._exit(0)
    os.environ.update(json.loads(told))
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)


@contextmanager
def _first_to_go() -> Iterator[None]:
    """Inside the `with` block the kernel takes this process, and no rank, when memory runs out."""
    try:
        with open(_OOM, "r+", encoding="ascii") as file:
            before = file.read()
            file.write(_FIRST)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with open(_OOM, "w", encoding="ascii") as file:
            file.write(before)


@contextmanager
def _in_background() -> Iterator[None]:
    """What is inside the `with` block gives way to others, where a process may take its old priority back."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if not _may_return_to(before):
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, max(before, _BEHIND))
    try:
        yield
    finally:
        for thread in os.listdir("/proc/self/task"):  # each has its own on Linux; libraries have started some
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), before)


def _may_return_to(priority: int) -> bool:
    """Tries it in a thread of its own."""
    returned = []

    def attempt() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, max(priority, _BEHIND))
            os.setpriority(os.PRIO_PROCESS, 0, priority)
            returned.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(returned)
