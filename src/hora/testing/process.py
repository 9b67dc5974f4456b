"""The zygote and the ranks as the test process sees them: processes with a socket each. Imports no torch."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from hora.testing import channel

_IMPORT_TIMEOUT_S = 120.0
_REAP_TIMEOUT_S = 10.0


class Zygote:
    """The process that ranks are forked from; started on first use."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self) -> "Rank":
        """A new rank."""
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115 (the Rank closes it)
        with theirs:
            pid = self._ask({"fork": True}, theirs.fileno(), output.fileno())["pid"]
        return Rank(pid, ours, output, self)

    def reap(self, pid: int) -> int:
        """Waits for the end of a rank that has been killed or is ending; its exit code, or minus the signal."""
        return int(self._ask({"reap": pid})["exit_code"])

    def close(self) -> None:
        """Ends the zygote and with it all ranks."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(_REAP_TIMEOUT_S)
            self._process = self._control = None

    def _started(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "hora.testing.zygote", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    # Libraries that start threads when they are imported cannot be forked.
                    env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            self._control.settimeout(_IMPORT_TIMEOUT_S)
            if channel.receive(self._control) is None:
                raise RuntimeError(f"the zygote ended with exit code {self._process.wait()} before it was ready; see its traceback above")
            self._control.settimeout(_REAP_TIMEOUT_S)
        return self._control

    def _ask(self, request: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        control = self._started()
        # The descriptors travel with a byte of their own, ahead of the request.
        socket.send_fds(control, [b"?"], descriptors)
        channel.send(control, request)
        answer = channel.receive(control)
        if answer is None:
            raise RuntimeError("the zygote is gone; see its traceback above")
        return answer


@dataclass(eq=False)
class Rank:
    """One rank as the test process sees it."""

    pid: int
    sock: socket.socket
    output: IO[bytes]
    zygote: Zygote
    events: list[str] = field(default_factory=list)
    answer: dict[str, Any] | None = None
    exit_code: int | None = None
    _output_start: int = 0

    def ask(self, request: Mapping[str, Any]) -> None:
        """Sends a request."""
        self.answer = None
        self.output.seek(0, os.SEEK_END)
        self._output_start = self.output.tell()
        with suppress(BrokenPipeError, ConnectionResetError):
            channel.send(self.sock, dict(request))

    def hear(self) -> None:
        """Takes the next message: news for `events`, the `answer` to the request, or the end of the process."""
        message = channel.receive(self.sock)
        if message is None:
            self.answer = {"kind": "died", "text": describe_exit(self.end())}
        elif "event" in message:
            self.events.append(message["event"])
        else:
            self.answer = message

    def printed(self) -> str:
        """What the rank has printed since the last request."""
        self.output.seek(self._output_start)
        return self.output.read().decode(errors="replace")

    def signal(self, number: int) -> None:
        """Sends a signal."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> int:
        """Kills the rank, if it still runs, and what it has started, and waits for it; its exit code, or minus the signal."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.exit_code = self.zygote.reap(self.pid)
        return self.exit_code

    def close(self) -> None:
        """Ends the rank and closes what it was reached through."""
        self.sock.close()
        self.end()
        self.output.close()


def describe_exit(exit_code: int) -> str:
    """`killed by SIGKILL`, `exited with code 3`."""
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exited with code {exit_code}"
