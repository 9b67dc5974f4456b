"""The guardian: a tiny process that outlives the launcher by a moment and ends what the launcher left.

It holds the reading end of a pipe; the system closes the other end when the launcher dies, in whatever way. `reaper` is its program. A guardian that
dies is replaced.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hora import env
from hora.launch import reaper
from hora.log import get_logger

_MAX_STARTS = 5
_DISMISS_S = 5.0


class Guardian:
    """Starts a guardian for a job, which removes its `directories` too; `mark` as in `reaper.end_processes`."""

    def __init__(self, directories: Sequence[Path], mark: bytes, environ: Mapping[str, str] = os.environ) -> None:
        program = Path(reaper.__file__).resolve()
        self._command = [sys.executable, "-I", "-S", os.fspath(program), os.fsdecode(mark), *map(os.fspath, directories)]
        # A launcher may itself run in a job, whose end must not take this job's guardian before its work is done.
        self._environ = {name: value for name, value in environ.items() if name != env.JOB_DIR}
        self._groups: set[int] = set()
        self._starts = 0
        self._given_up = False
        self._start()

    @property
    def pid(self) -> int:
        """Process of the guardian in office."""
        return self._process.pid

    def add(self, group: int) -> None:
        """Puts a process group under guard."""
        self._groups.add(group)
        self._say(b"+%d" % group)

    def discard(self, group: int) -> None:
        """Takes a group from under guard: it is empty, and its number may come to belong to others."""
        self._groups.discard(group)
        self._say(b"-%d" % group)

    def renew(self) -> None:
        """Starts another guardian if this one is dead; one that dies again and again is given up with a warning."""
        if self._given_up or self._process.poll() is None:
            return
        os.close(self._pipe)
        if self._starts < _MAX_STARTS:
            self._start()
            return
        self._given_up = True
        get_logger().warning(
            "the guardian of this job died %d times and is not started again: if this launcher is killed, its ranks may go on", self._starts
        )

    def dismiss(self) -> None:
        """Lets the guardian go without doing anything."""
        if self._given_up:
            return
        self._say(reaper.GOODBYE)
        os.close(self._pipe)
        try:
            self._process.wait(_DISMISS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._starts += 1
        pipe, self._pipe = os.pipe()
        # Before it is there, so that it knows from the beginning.
        for group in self._groups:
            self._say(b"+%d" % group)
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=pipe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=self._environ, cwd="/", start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(pipe)

    def _say(self, word: bytes) -> None:
        # A dead guardian is replaced by `renew`, which tells the new one everything.
        if not self._given_up:
            with suppress(BrokenPipeError):
                os.write(self._pipe, word + b"\n")
