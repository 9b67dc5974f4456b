"""Runs scripts, those under `hora prove` too, without starting Python: they are forked from a process that has torch already."""

import atexit
import gc
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from hora.diag.prove.run import Ended, Start
from hora.testing import bodies
from hora.testing.outcomes import gather
from hora.testing.process import Zygote

_FAILURE_GRACE_S = 2.0


class Nest:
    """A process that has imported, once, what optimizers and DistributedDataParallel need, and forks processes that are used once.

    Use as a context manager.
    """

    def __init__(self, zygote: Zygote) -> None:
        self._rank = zygote.fork()
        self.ask(body_prepare, 60.0)

    def ask(self, body: Callable[..., Any], timeout_s: float, /, **arguments: Any) -> Any:
        """What `body` returns there."""
        self._rank.ask({"body": bodies.describe(body), "arguments": bodies.encode_arguments(arguments), "sys_path": sys.path})
        (outcome,) = gather({0: self._rank}, timeout_s)
        assert outcome.kind == "passed", outcome
        return outcome.result

    def run(self, body: Callable[..., None], output: Path, timeout_s: float = 30.0, **environ: str) -> None:
        """Runs `body` in a process of its own, which it may change as it likes; it must not raise."""
        code = self.ask(body_alone, timeout_s, description=bodies.describe(body), output=output, environ=environ)
        assert code == 0, output.read_text()

    def run_fresh(self, script: Path, directory: Path, output: Path, timeout_s: float, **environ: str) -> None:
        """Runs a Python script in `directory` as a process does that has imported nothing but torch; it must succeed."""
        code = self.ask(body_fresh, timeout_s, script=script, directory=directory, output=output, environ=environ)
        assert code == 0, f"{script.read_text()}\n--- printed ---\n{output.read_text()[-3000:]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rank.close()


class ForkingStarter:
    """Starts scripts that take their place from RANK and WORLD_SIZE. Everything else is as `hora run` does it."""

    def __init__(self, nest: Nest) -> None:
        self._nest = nest

    def __call__(self, start: Start) -> Ended:
        environ = {name: value for name, value in start.environ.items() if name.startswith("HORA_")}
        result = self._nest.ask(
            body_ranks,
            start.timeout_s + 20.0,
            words=list(start.words),
            ranks=start.ranks,
            module=start.module,
            environ=environ | ({"HORA_EXACT": "8"} if start.exact else {}),
            output=start.directory / "output.txt",
            timeout_s=start.timeout_s,
            cwd=Path.cwd(),
        )
        return Ended(result, start.directory.joinpath("output.txt").read_text()[-2000:])


def body_prepare():
    """Does here, once, what would cost each process more than its script: imports, and leaving to nobody what torch wants done at exit."""
    import hora
    import hora.diag.prove.recorder
    import hora.recipes.lm.recipe

    for name in hora.__all__:
        getattr(hora, name)
    for finalizer in weakref.finalize._registry:  # torch takes its operators back one by one, 0.1 s
        finalizer.atexit = False
    gc.freeze()


def body_alone(description, output, environ):
    """Forks a process that runs a body; its exit code."""

    def run():
        bodies.find(description)()
        return 0

    with output.open("wb") as file:
        return _end_of(_fork(run, file.fileno(), environ, Path.cwd()))


def body_fresh(script, directory, output, environ):
    """Forks a process that runs a script; its exit code."""

    def run():
        # A name of Hora's that the script forgets to import is missing here as it is elsewhere.
        for name in [name for name in sys.modules if name.partition(".")[0] == "hora"]:
            del sys.modules[name]
        return _run_script([str(script)], module=False)

    with output.open("wb") as file:
        return _end_of(_fork(run, file.fileno(), environ, directory))


def body_ranks(words, ranks, module, environ, output, timeout_s, cwd):
    """Forks the ranks and waits for them; the first bad exit code, or None if they were ended at the deadline."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{name: str(value) for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()} for rank in range(ranks)]
    with output.open("wb") as file:
        children = {rank: _fork(lambda: _run_recorded(words, module), file.fileno(), places[rank] | environ, cwd) for rank in range(ranks)}
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


def _fork(run, output, environ, cwd):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(cwd)
        _become(output, environ)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become(output, environ):
    """Makes this process a fresh one: with an output, variables and random numbers of its own."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environ)
    warnings.simplefilter("default")


def _leave(code):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_recorded(words, module):
    from hora.diag.prove import recorder

    recorder.start()
    return _run_script(words, module)


def _run_script(words, module):
    import torch

    torch.set_num_threads(1)
    torch.seed()
    random.seed()
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
