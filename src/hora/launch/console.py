"""Runs a click command as a program: an error is one sentence and an exit code, never a traceback."""

import os
import sys
from collections.abc import Sequence

import click

from hora.errors import HoraError
from hora.exits import code_after


def run_command(command: click.Command, args: Sequence[str] | None = None, *, name: str) -> int:
    """Runs `command` with `args` (default: this process's) under the name `name`; returns the exit code.

    2 for what the user gave wrong (`exits.WRONG`, or click's own usage errors), 1 for other errors of Hora, 130 for Ctrl-C; else what the command
    returns (None counts as 0).
    """
    _open_standard_streams()
    try:
        result = command.main(args, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except HoraError as error:
        sys.stderr.write(f"hora: {error}\n")
        return code_after(error)
    return result if isinstance(result, int) else 0


def _open_standard_streams() -> None:
    """Has those of the three standard descriptors that are closed lead nowhere.

    Else the next files and sockets that are opened get their numbers, and receive what is printed: the launcher would take a line's end for a signal.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
