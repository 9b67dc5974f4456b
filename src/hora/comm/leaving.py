"""Leaving a job may not take for ever: what holds NCCL's calls is given back where nobody can use it any more, and there is a deadline."""

import faulthandler
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from hora.exits import FAILED

LEAST_S = 20.0
"""Leaving well may take this long in any case: rank 0 waits for ranks that have not left yet."""


def reset_graphs() -> None:
    """Gives back the CUDA graphs of a process that ends: NCCL waits for ever for those that hold its calls."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.cuda.CUDAGraph):
            with suppress(RuntimeError):  # the device may have failed, and the others are still to be told
                found.reset()


@contextmanager
def ending_within(timeout_s: float, rank: int) -> Iterator[None]:
    """Ends the process if the `with` block takes longer (or than `LEAST_S`): what it waits for cannot be broken off otherwise."""
    done = threading.Event()
    timeout_s = max(timeout_s, LEAST_S)

    def watch() -> None:
        if not done.wait(timeout_s):
            message = (
                f"hora: rank {rank} could not leave the job within {timeout_s:g} s and ends now: a collective that is under way on the device "
                "does not end, or a CUDA graph still holds NCCL's calls; call graph.reset() on graphs of your own before hora.shutdown()\n"
            )
            os.write(2, message.encode())
            os._exit(FAILED)

    end = done.set
    try:
        threading.Thread(target=watch, daemon=True, name="hora-leaving").start()
    except RuntimeError:  # Python 3.12 begins no thread any more when the interpreter ends; this says where the rank is instead
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)
        end = faulthandler.cancel_dump_traceback_later
    try:
        yield
    finally:
        end()
