"""Runs a script under `hora prove` without starting Python: its ranks are forked from a process that has torch already."""

import atexit
import gc
import importlib
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Self

from hora.diag.prove.run import Ended, Start
from hora.testing import bodies
from hora.testing.outcomes import gather
from hora.testing.process import Zygote

_FAILURE_GRACE_S = 2.0


class ForkingStarter:
    """Starts scripts that take their place from RANK and WORLD_SIZE. Everything else is as `hora run` does it.

    Use as a context manager. One process lives as long: it imports, once, what DistributedDataParallel needs, and is what the ranks are forked from.
    """

    def __init__(self, zygote: Zygote) -> None:
        self._nest = zygote.fork()

    def __call__(self, start: Start) -> Ended:
        environ = {name: value for name, value in start.environ.items() if name.startswith("HORA_")}
        arguments = {
            "words": list(start.words),
            "ranks": start.ranks,
            "module": start.module,
            "environ": environ | ({"HORA_EXACT": "8"} if start.exact else {}),
            "output": start.directory / "output.txt",
            "timeout_s": start.timeout_s,
            "cwd": Path.cwd(),
        }
        self._nest.ask({"body": bodies.describe(body_ranks), "arguments": bodies.encode_arguments(arguments), "sys_path": sys.path})
        (outcome,) = gather({0: self._nest}, start.timeout_s + 20.0)
        assert outcome.kind == "passed", outcome
        return Ended(outcome.result, start.directory.joinpath("output.txt").read_text()[-2000:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._nest.close()


def body_ranks(words, ranks, module, environ, output, timeout_s, cwd):
    """Forks the ranks and waits for them; the first bad exit code, or None if they were ended at the deadline."""
    _prepare()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with output.open("wb") as file:
        children = {rank: _fork(rank, words, ranks, module, environ, file.fileno(), port, cwd) for rank in range(ranks)}
    codes, end_s, failed = {}, time.monotonic() + timeout_s, False
    while children:
        for rank, pid in list(children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del children[rank]
                if codes[rank] and not failed:
                    failed, end_s = True, min(end_s, time.monotonic() + _FAILURE_GRACE_S)
        if children and time.monotonic() > end_s:
            for pid in children.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in children.values():
                os.waitpid(pid, 0)
            return next(code for code in codes.values() if code) if failed else None
        time.sleep(0.005)
    return next((code for code in codes.values() if code), 0)


def _prepare():
    """Imports once what each rank of DistributedDataParallel would import for itself."""
    if "torch._dynamo" not in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torch._dynamo")
        gc.collect()
        gc.freeze()


def _fork(rank, words, ranks, module, environ, output, port, cwd):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(cwd)
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in place.items()} | environ)
        code = _run_script(words, module)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_script(words, module):
    import torch

    from hora.diag.prove import recorder

    torch.set_num_threads(1)
    torch.seed()
    random.seed()
    warnings.simplefilter("default")
    recorder.start()
    sys.argv = list(words)
    try:
        if module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    return code
