"""The agent on one other host, as the launcher that starts it sees it: a remote shell, and what is said through it."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hora.errors import ConfigError
from hora.launch import wire
from hora.launch.child import start_tied
from hora.launch.rsh import explain_failure
from hora.launch.sinks import Sink

_GOING_S, _LEAVE_S = 2.0, 1.0
_MAX_SAID_BYTES = 1 << 14


class Remote:
    """The remote shell `command` to `host`, and the agent at its end, which runs under `python`.

    Raises:
        ConfigError: there is no such command.
    """

    def __init__(self, host: str, command: Sequence[str], python: str) -> None:
        self.host = host
        self._python = python
        stdin, self.mouth = os.pipe()
        self._stdout, stdout = os.pipe()
        self.errors, stderr = os.pipe()
        os.set_blocking(self.mouth, False)
        try:
            # A session of its own: a terminal's Ctrl-C is for the launcher, and there is nobody to ask for a password. Tied, since a remote shell
            # that is still connecting does not notice that its input has ended.
            self._process = start_tied(command, stdin=stdin, stdout=stdout, stderr=stderr)
        except OSError as error:
            for descriptor in (self.mouth, self._stdout, self.errors):
                os.close(descriptor)
            raise ConfigError(
                f"{command[0]!r} cannot be started: {error.strerror}; name what starts a command on a host with --rsh"
            ) from error
        finally:
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)
        self._decoder = wire.Decoder(wire.GREETING)
        self._outgoing = b""
        self._said = b""
        self._answer: dict[str, Any] | None = None
        self._ended: set[str] = set()
        self._broken: str | None = None
        self._done = self.lost = self._handed_over = self._busy = False
        self.closed = False
        self._heard = time.monotonic()

    @property
    def pid(self) -> int:
        """Process of the remote shell."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the remote shell has ended, as far as that has been noticed."""
        return self._process.returncode is not None

    # Before the ranks run: the main thread.

    def say(self, message: Mapping[str, Any]) -> None:
        """Puts a message on its way; `send` sends it."""
        self._outgoing += wire.pack_message(message)

    def send(self) -> bool:
        """Sends as much as can be sent without waiting; whether nothing is left to send."""
        try:
            self._outgoing = self._outgoing[os.write(self.mouth, self._outgoing) :] if self._outgoing else b""
        except BlockingIOError:
            pass
        except OSError:  # it is gone
            self._outgoing = b""
        return not self._outgoing

    def ears(self) -> Iterator[tuple[int, Callable[[bytes], None]]]:
        """What to read from, and what takes what was read; nothing is its end."""
        for descriptor, name, take in ((self._stdout, "stdout", self._take_stdout), (self.errors, "stderr", self._take_stderr)):
            if name not in self._ended:
                yield descriptor, take

    @property
    def awaited(self) -> bool:
        """Whether it may yet answer."""
        return self._answer is None and self._broken is None and len(self._ended) < 2

    @property
    def blames_user(self) -> bool:
        """Whether its answer is that something the user gave is wrong."""
        return bool(self._answer and self._answer.get("config"))

    def problem(self, waited_s: float) -> str | None:
        """Why this host cannot be used; None if it has answered as it should."""
        if self._answer is not None:
            refusal = self._answer.get("refused")
            return None if refusal is None else f"{self.host}: {refusal}"
        if self._broken is not None:
            return f"{self.host}: its agent must speak as this launcher does, but does not: {self._broken}; install the same Hora there"
        code = None
        if self._ended:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_LEAVE_S)
        said = (self._decoder.skipped + self._said).decode(errors="replace")
        return explain_failure(self.host, exit_code=code, said=said, python=self._python, waited_s=waited_s)

    def take_answer(self) -> dict[str, Any]:
        """Its answer, which makes room for the next one."""
        answer, self._answer = self._answer, None
        assert answer is not None
        return answer

    def _take_stdout(self, data: bytes) -> None:
        if not data:
            self._ended.add("stdout")
        try:
            for frame in self._decoder.feed(data):
                if isinstance(frame, wire.Message):
                    self._answer = self._answer or frame.fields
        except ValueError as error:
            self._broken = str(error)

    def _take_stderr(self, data: bytes) -> None:
        if not data:
            self._ended.add("stderr")
        self._said = (self._said + data)[-_MAX_SAID_BYTES:]

    # While they run: `take` and `finish` in the output thread, the rest in the main thread.

    def hand_over(self) -> int:
        """The descriptor to read from; it, and that of the errors, are the caller's from now on."""
        self._handed_over = True
        self._heard = time.monotonic()
        return self._stdout

    def take(self, data: bytes) -> Iterator[wire.Output]:
        """Output of ranks that is complete with `data`.

        Raises:
            ValueError: this is not what an agent says.
        """
        self._busy = True
        for frame in self._decoder.feed(data):
            if isinstance(frame, wire.Output):
                yield frame
            else:
                self._broken = frame.fields.get("failed", self._broken)
                self._done |= "ended" in frame.fields
        self._busy, self._heard = False, time.monotonic()

    def spoil(self, why: str) -> None:
        """Gives it up."""
        self._busy, self._broken = False, why
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)

    def finish(self) -> None:
        """Takes note that nothing more will come."""
        self._busy, self.closed = False, True

    def silent_s(self, since: float) -> float:
        """For how long nothing has come after the time `since`, although it could have been shown."""
        return 0.0 if self._busy else time.monotonic() - max(since, self._heard)

    def notice_end(self) -> bool:
        """Whether the host is lost, the first time that this is known."""
        if self._process.poll() is not None:
            self.hang_up()  # an agent may have outlived its remote shell
        if self.lost or self._done or not self.closed:
            return False
        self.lost = True
        return True

    def explain_loss(self) -> str:
        """What is known of its end."""
        if self._broken:
            return f"{self.host}: {self._broken}"
        code = self._process.poll()
        how = "its agent is gone" if code is None else f"the connection to it, or its agent, has ended (exit code {code})"
        return f"the host {self.host} is lost, so all ranks were ended: {how}"

    def hang_up(self) -> None:
        """Says nothing more, at which an agent ends its ranks. May be called again."""
        if self.mouth >= 0:
            os.close(self.mouth)
            self.mouth = -1

    def end(self) -> None:
        """Waits a moment until the remote shell is gone, then kills it."""
        patience_s = _GOING_S if self._answer is not None or self._handed_over else 0.0
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            if signum is not None and self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s if signum is None else _LEAVE_S)
        if not self._handed_over:
            os.close(self._stdout)
            os.close(self.errors)


class Link:
    """What an agent writes, on its way to the `sinks` of its ranks, by rank and stream."""

    rank = None

    def __init__(self, remote: Remote, sinks: Mapping[tuple[int, int], Sink], on_end: Callable[[], None]) -> None:
        self._remote = remote
        self._sinks = sinks
        self._on_end = on_end
        self._spoiled = False
        self.descriptor = remote.hand_over()

    @property
    def sinks(self) -> Sequence[Sink]:
        """Those of all its ranks."""
        return tuple(self._sinks.values())

    def take(self, data: bytes, now: float) -> None:
        """Passes on what ranks wrote; an agent that says what none would say is hung up on."""
        if self._spoiled:
            return
        try:
            for output in self._remote.take(data):
                self._sinks[output.rank, output.stream].take(output.data, now)
        except (ValueError, KeyError) as error:
            self._spoiled = True
            self._remote.spoil(f"its agent must speak as this launcher does, but does not: {error}")

    def end(self) -> None:
        """Takes note of it, and has the main thread look."""
        self._remote.finish()
        self._on_end()
