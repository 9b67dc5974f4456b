"""The process that imports torch once and then forks ranks in milliseconds.

Started as `python -m hora.testing.zygote FD`. It answers requests on the socket FD one by one; when the socket closes, its ranks are killed
and it ends. It never touches CUDA, so that each forked rank can.
"""

import gc
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import torch

# Imported here so that no rank has to; the first is what making an optimizer loads, and takes two seconds.
import torch._dynamo

import hora.comm.collectives
import hora.comm.session  # noqa: F401
from hora.testing import channel
from hora.testing.rank import serve


def main() -> None:
    """Serves until the test process goes away."""
    torch.set_num_threads(1)
    # What is imported by now is never garbage: collections in the ranks take 1 ms rather than 200, and share its memory.
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    channel.send(control, {"ready": os.getpid()})
    children: set[int] = set()
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not data:
                break
            request = channel.receive(control)
            if request is None:
                break
            channel.send(control, _answer(request, descriptors, control, children))
    finally:
        for pid in children:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _answer(request: dict[str, Any], descriptors: list[int], control: socket.socket, children: set[int]) -> dict[str, Any]:
    if "reap" in request:
        pid, status = os.waitpid(request["reap"], 0)
        children.discard(pid)
        return {"exit_code": os.waitstatus_to_exitcode(status)}
    pid = os.fork()
    if pid == 0:
        _become_rank(descriptors, control)
    _lead_group(pid)
    for descriptor in descriptors:
        os.close(descriptor)
    children.add(pid)
    return {"pid": pid}


def _become_rank(descriptors: list[int], control: socket.socket) -> None:
    exit_code = 1
    try:
        _lead_group(os.getpid())
        control.close()
        connection, output = descriptors
        serve(socket.socket(fileno=connection), output)
        exit_code = 0
    finally:
        # Not sys.exit: the zygote's stack and its exit handlers are not the rank's.
        sys.stderr.flush()
        os._exit(exit_code)


def _lead_group(pid: int) -> None:
    """A group of its own for each rank, so that what it starts ends with it. Done by both sides: neither knows which of them comes first."""
    with suppress(OSError):
        os.setpgid(pid, pid)


if __name__ == "__main__":
    main()
