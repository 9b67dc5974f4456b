"""What a rank does for the tests: it joins, runs bodies one after the other, and says how each went."""

import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hora import events
from hora.comm import session
from hora.testing import bodies, channel
from hora.testing.guards import Guard
from hora.testing.telling import tell_through


def serve(sock: socket.socket, output: int) -> None:
    """Answers the test process until it goes away. What the rank prints goes to the file `output`."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR2, 2, all_threads=True)
    tell_through(sock)
    while (request := channel.receive(sock)) is not None:
        channel.send(sock, _handle(request))
    session.shutdown()


def _handle(request: dict[str, Any]) -> dict[str, Any]:
    """Does what was asked; an exception becomes the answer."""
    try:
        if "environ" in request:
            os.environ.update(request["environ"])
            events.arm_faults()
        if "init" in request:
            session.init(**request["init"])
        if "body" not in request:
            return {"kind": "passed"}
        before = _session_in_force()
        return {"kind": "passed", "result": _run(request), "clean": _session_in_force() is before}
    except BaseException as error:
        # pytest.skip raises an exception of its own, which this process need not know.
        if type(error).__name__ == "Skipped":
            return {"kind": "skipped", "text": str(error)}
        return {"kind": "failed", "text": "".join(traceback.format_exception(error)).rstrip()}


def _session_in_force() -> session.Session | None:
    return session.session() if session.is_initialized() else None


def _run(request: dict[str, Any]) -> Any:
    sys.path[:0] = [entry for entry in request["sys_path"] if entry not in sys.path]
    body = bodies.find(request["body"])
    torch.manual_seed(0)
    random.seed(0)
    guard = Guard.take()
    with warnings.catch_warnings(), _nothing_unseen():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")  # torch says so of the first backward on a GPU
        result = body(**bodies.decode_arguments(request["arguments"]))
    if leaks := guard.leaks():
        raise AssertionError("the test left behind on this rank: " + "; ".join(leaks))
    return result


@contextmanager
def _nothing_unseen() -> Iterator[None]:
    """Raises what was raised in threads and finalizers inside the block, where Python itself only prints it."""
    unseen: list[BaseException] = []
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook = lambda args: unseen.append(args.exc_value or RuntimeError(f"{args.exc_type.__name__} in {args.thread}"))
    sys.unraisablehook = lambda args: unseen.append(args.exc_value or RuntimeError(f"{args.exc_type.__name__} in {args.object!r}"))
    try:
        yield
        gc.collect()
    finally:
        threading.excepthook, sys.unraisablehook = hooks
    if unseen:
        raise BaseExceptionGroup("exceptions that nobody caught, in threads or finalizers of this rank", unseen)
