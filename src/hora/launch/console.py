"""Runs a click command as a program: an error is one sentence and an exit code, never a traceback."""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

import click

from hora.errors import HoraError
from hora.exits import WRONG, code_after

# Of a name that was given: it leads where this user may not go, or is longer than names are. All else about a file says where it was met.
_REFUSED_NAMES = (errno.EACCES, errno.ENAMETOOLONG)


def run_command(command: click.Command, args: Sequence[str] | None = None, *, name: str) -> int:
    """Runs `command` with `args` (default: this process's) under the name `name`; returns the exit code.

    2 for what the user gave wrong (`exits.WRONG`, or click's own usage errors), files that this user may not look at included, 1 for other
    errors of Hora and for standard output that takes no more, 130 for Ctrl-C; else what the command returns (None counts as 0).
    """
    _open_standard_streams()
    try:
        with redirect_stdout(_Output(sys.stdout)):
            result = command.main(args, prog_name=name, standalone_mode=False)
            sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except HoraError as error:
        if isinstance(error, _OutputRefused):
            _leave_output()
        sys.stderr.write(f"hora: {error}\n")
        return code_after(error)
    except OSError as error:
        if (problem := _what_cannot_be(error)) is None:
            raise
        sys.stderr.write(f"hora: {problem}\n")
        return WRONG
    if args is None:
        _settle_end()
    return result if isinstance(result, int) else 0


def _settle_end() -> None:
    """Has this process, which is about to end, keep its exit code when it is asked to end once more, as schedulers do.

    A second SIGTERM would take the place of a 75, after which the job is started again. Ctrl-C is heard as before.
    """
    with suppress(ValueError):  # in another thread than the main one, which then does not end the process
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)


def _what_cannot_be(error: OSError) -> str | None:
    """What is wrong with the name of a file that was given, or with the directory that this was started in; None: something else is."""
    if error.filename is not None and error.errno in _REFUSED_NAMES:
        return f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}; check the name, and what this user may do there"
    if error.filename is None and isinstance(error, FileNotFoundError):  # of os.getcwd, which is asked where a name is made a full path
        return "the directory that this was started in is there no more; go to another, or back to it if it was made anew (cd)"
    return None


class _Output:
    """Standard output whose refusals (a full disk, a reader that is gone) are errors of Hora's; all else is as the stream has it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> "_Output":
        return _Output(self._stream.buffer)

    def write(self, content: Any) -> Any:
        with self._refusals():
            return self._stream.write(content)

    def writelines(self, lines: Any) -> None:
        with self._refusals():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with self._refusals():
            self._stream.flush()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _OutputRefused(
                f"cannot write standard output: {error.strerror or error}; what it has not taken is lost, so let it go where all of it fits"
            ) from error


class _OutputRefused(HoraError):
    """Standard output takes no more."""


def _leave_output() -> None:
    """Has standard output lead nowhere, else Python tries once more as it ends, and complains."""
    with suppress(OSError):  # it may have no descriptor
        descriptor, nowhere = sys.stdout.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _open_standard_streams() -> None:
    """Has those of the three standard descriptors that are closed lead nowhere, and standard output take what its encoding lacks, escaped.

    Else the next files and sockets that are opened get their numbers, and receive what is printed: the launcher would take a line's end for a signal;
    and a letter that a locale lacks would end what takes hours. Standard error escapes it by itself.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
