"""The user's command that says which hosts there are."""

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import IO

from hora.errors import ConfigError
from hora.launch.child import start_tied
from hora.launch.hosts import Host, read_lines

DEADLINE_S = 30.0
"""How long the command may take."""

_GONE_S = 1.0
_MOST_BYTES = 1 << 20


def read_command(text: str) -> tuple[str, ...]:
    """The words of the command, which no shell sees; a path among them, if it is the first, is meant from here.

    Raises:
        ConfigError: they cannot be read, or there are none.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--host-discovery must be a command, but {text!r} cannot be read: {error}") from error
    if not words:
        raise ConfigError("--host-discovery must be a command that prints lines `host:slots`, but is empty")
    return (os.path.abspath(words[0]) if os.sep in words[0] else words[0], *words[1:])


class Discovery:
    """Runs `command` when told to, once at a time, without waiting for it."""

    def __init__(self, command: Sequence[str], deadline_s: float = DEADLINE_S) -> None:
        self._command = command
        self._name = f"--host-discovery {shlex.join(command)}"
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._end = 0.0

    @property
    def pids(self) -> Collection[int]:
        """Its process, while it runs."""
        return () if self._process is None else (self._process.pid,)

    def begin(self, now: float) -> None:
        """Starts the command.

        Raises:
            ConfigError: it cannot be started.
        """
        self._said, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = start_tied(self._command, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._errors)
        except OSError as error:
            self._close_files()
            raise ConfigError(
                f"{self._name} cannot be started: {error.strerror}; name a program, with its path if it is not in PATH"
            ) from error
        self._end = now + self._deadline_s

    def poll(self, now: float) -> tuple[Host, ...] | None:
        """The hosts that it has named; None while it runs.

        Raises:
            ConfigError: it failed, took too long, or named no hosts.
        """
        assert self._process is not None
        code = self._process.poll()
        # One that prints without end is not left to fill the disk.
        flooded = any(os.fstat(file.fileno()).st_size >= _MOST_BYTES for file in (self._said, self._errors))
        if code is None and now < self._end and not flooded:
            return None
        said, errors = _read(self._said), _read(self._errors)
        self.stop()
        must = f"{self._name} must print lines `host:slots` and end with exit code 0"
        if flooded:
            raise ConfigError(f"{must}, but printed {_MOST_BYTES} bytes and more")
        if code is None:
            raise ConfigError(f"{must}, but did not end within {self._deadline_s:g} s")
        if code:
            last = [line for line in errors.splitlines() if line.strip()][-1:]
            raise ConfigError(f"{must}, but ended with exit code {code if code > 0 else 128 - code}{''.join(f': {line}' for line in last)}")
        return read_lines(said.splitlines(), self._name, self._name, distinct=True)

    def stop(self) -> None:
        """Ends the command with all of its group, if it runs. May be called again."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_S)
        self._process = None
        self._close_files()

    def _close_files(self) -> None:
        self._said.close()
        self._errors.close()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_BYTES).decode(errors="replace")
