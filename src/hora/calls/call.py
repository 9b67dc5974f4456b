"""`hora.run`: calls a function on several ranks of this machine and returns what it returned on each.

The ranks are started by `hora run`, in a process of its own, with all that it does for them; function, arguments and results travel through
files of a private directory, as names and plain data. A directory that a killed program leaves is removed by the next `hora run`.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from hora.calls import functions
from hora.calls.request import Failure, Request, arguments_path, result_path
from hora.errors import ConfigError, LaunchError, RankFailed
from hora.launch.job_directory import base_directory, job_directory
from hora.launch.started import launcher

_GRACE_S = 5.0
# What the launcher says at last, of the rank that failed first.
_REPORT = re.compile(rb"^hora: rank (\d+) failed ")


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_ranks: int,
    timeout_s: float | None = None,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on each of `num_ranks` new ranks of this machine and returns the results, by rank.

    The ranks import the function, which must stand at the top of a module; there it calls `hora.init()`, if it wants the ranks to talk to each
    other. Arguments and results are values, tensors, arrays, and lists, tuples, dicts, sets and dataclasses of them; tensors come back on the
    CPU. What the ranks print is shown here. Nothing is left when this returns, or when this process ends in whatever way.

    Args:
        function: of a module that the ranks can import from where this process imports.
        args: what it is given, the same on each rank.
        kwargs: by name.
        num_ranks: how many.
        timeout_s: deadline in seconds for all of it; None waits for as long as it takes.

    Raises:
        ConfigError: the function or something in its arguments cannot travel; nothing has been started. Or the results cannot be read here.
        RankFailed: it raised an exception on a rank, or a rank died; names the rank, with its traceback.
        LaunchError: the ranks could not be started, or had not all returned at the deadline.
    """
    return run_with((), function, args, kwargs, num_ranks=num_ranks, timeout_s=timeout_s)


def run_with(
    words: Sequence[str],
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_ranks: int,
    timeout_s: float | None = None,
    path: Sequence[str] = (),
) -> list[Any]:
    """As `run`, on ranks that are started with more `words` of `hora run`, all on this machine, and that look for modules in `path` first."""
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, but is {num_ranks} instead")
    request = Request(functions.describe(function), [*path, *(entry or "." for entry in sys.path)])
    from hora.calls.files import read_object, write_object  # here, because it loads torch

    with job_directory(base_directory()) as directory:
        request.write(directory)
        write_object(arguments_path(directory), {"args": tuple(args), "kwargs": dict(kwargs or {})}, "the arguments")
        name = functions.say(request.function)
        _call(directory, name, num_ranks, timeout_s, words)
        if left := [rank for rank in range(num_ranks) if not result_path(directory, rank).exists()]:
            raise RankFailed(f"{name} must return, but ended the process of rank {left[0]} with exit code 0 (sys.exit?)", left[0])
        return [read_object(result_path(directory, rank)) for rank in range(num_ranks)]


def _call(directory: Path, name: str, num_ranks: int, timeout_s: float | None, more: Sequence[str]) -> None:
    """Has the ranks do it; returns when all have left their results."""
    words = ["-np", str(num_ranks), *more, "-m", "hora.calls.rank", str(directory)]
    with launcher(words, grace_s=_GRACE_S, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        shown, said = _Shown(process.stdout, sys.stdout), _Shown(process.stderr, sys.stderr, until=_REPORT)
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = ", ".join(str(rank) for rank in range(num_ranks) if not result_path(directory, rank).exists())
            raise LaunchError(f"{name} must return within {timeout_s:g} s, but has not on rank {late}") from None
        finally:
            if process.poll() is None:
                process.terminate()
            shown.finish()
            said.finish()
    if exit_code:
        raise _explain(directory, name, said.kept.decode(errors="replace").strip(), exit_code)


def _explain(directory: Path, name: str, report: str, exit_code: int) -> LaunchError:
    """The error for a job that ended with this exit code."""
    found = re.match(r"hora: rank (\d+) ", report)
    if found is None:
        return LaunchError(f"{name} did not return on all ranks: the job ended with exit code {exit_code}; what was said stands above")
    rank = int(found[1])
    failure = Failure.read(directory, rank)
    if failure is None:
        return RankFailed(f"rank {rank} ended before {name} returned: {report.removeprefix('hora: ')}", rank)
    return RankFailed(f"{name} failed on rank {rank}: {failure.summary}\n\n{failure.trace}", rank, failure.trace)


class _Shown:
    """Shows in a thread what comes from `source` on `target`, as a notebook or a test has it, up to a line that begins as `until` says.

    That line and what follows is in `kept`.
    """

    def __init__(self, source: IO[bytes], target: TextIO | None, until: "re.Pattern[bytes] | None" = None) -> None:
        self._source = source
        self._target = target
        self._until = until
        self.kept = b""
        self._thread = threading.Thread(target=self._run, name="hora-call-output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until all has been shown."""
        self._thread.join()
        self._source.close()

    def _run(self) -> None:
        for line in self._source:
            if self.kept or (self._until is not None and self._until.match(line)):
                self.kept += line
                continue
            if self._target is None:  # as in a process without standard streams
                continue
            with suppress(Exception):  # it has been closed, or is what a notebook has put there; what is not read would hold up the ranks
                self._target.write(line.decode(errors="replace"))
                self._target.flush()
