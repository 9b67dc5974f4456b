"""Starts launchers as processes of their own, hears from their ranks, and looks for what they leave behind."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from hora.launch.inbox import FORWARDED

PROMISED_S = 1.0
_POLL_S, _STALL_S = 0.002, 0.05
"""How soon everybody is gone, in the words of the documentation."""

# What the scripts of the ranks begin with. `tell` reports to the test: the rank, a word, and numbers.
PRELUDE = """\
import os, signal, subprocess, sys, time

RANK = int(os.environ["RANK"])


def tell(word, *numbers):
    with open(os.environ["TELL"], "w") as pipe:
        pipe.write(" ".join(map(str, (RANK, word, *numbers))) + "\\n")


def wait_forever():
    # Python looks for signals between two naps: one that comes just before a nap begins does not end it.
    while True:
        time.sleep(0.1)


def grandchild(*, own_session=False):
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=own_session, stdout=subprocess.PIPE)
    child.stdout.readline()
    return child.pid


"""


@contextmanager
def inherited_signals(ignored: Iterable[signal.Signals] = ()) -> Iterator[None]:
    """Processes started inside the `with` block find these signals ignored and all others not.

    Whatever this process was started with: a shell has its background jobs ignore SIGINT, nohup SIGHUP.
    """
    handlers = {signum: signal.SIG_IGN if signum in ignored else (lambda *_: None) for signum in FORWARDED}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Job:
    """One launcher with its ranks, which run `body` after the prelude with the arguments `words`. It is started with the signals `ignored`.

    The body is a script, which `target` may name in another way, or not at all.
    """

    def __init__(
        self,
        directory: Path,
        body: str,
        *flags: str,
        name: str = "job",
        ignored: Iterable[signal.Signals] = (),
        words: Iterable[str] = (),
        target: str | None = None,
        **environ: str,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.script = directory / f"{name}.py"
        self.script.write_text(PRELUDE + body, encoding="utf-8")
        self.state, self.temporary = directory / "state", directory / f"tmp-{name}"
        self.temporary.mkdir()
        self._pipe = directory / f"{name}.pipe"
        os.mkfifo(self._pipe)
        # Open for writing too, so that it does not end while no rank has it open.
        self._reader = os.open(self._pipe, os.O_RDWR | os.O_CLOEXEC)
        self._heard = b""
        self._oracle = f"HORA_TEST_JOB={self.script}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HORA_")}
        self._out, self._err = directory / f"{name}.out", directory / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err, inherited_signals(ignored):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hora.launch", *flags, target or str(self.script), *words],
                env=inherited
                | {"TELL": str(self._pipe), "HORA_STATE_DIR": str(self.state), "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
                | {"HORA_TEST_JOB": str(self.script)}
                | environ,
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Process of the launcher."""
        return self.process.pid

    @property
    def out(self) -> str:
        """What the launcher has written to standard output so far."""
        return self._out.read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        """What the launcher has written to standard error so far."""
        return self._err.read_text(encoding="utf-8", errors="replace")

    def expect(self, word: str, ranks: int, timeout_s: float = 60.0) -> dict[int, list[int]]:
        """Waits until that many ranks have told `word`; returns the numbers that each told with it."""
        told: dict[int, list[int]] = {}
        end = time.monotonic() + timeout_s
        while len(told) < ranks:
            rank, heard, *numbers = self._next_line(end, f"{word} from {ranks} ranks, got it from {sorted(told)}").split()
            assert heard == word, f"expected {word!r}, but rank {rank} told {heard!r}\n{self.err}"
            told[int(rank)] = [int(number) for number in numbers]
        return told

    def expect_any(self, count: int, timeout_s: float = 60.0) -> dict[str, list[int]]:
        """The next `count` words that ranks tell, whichever they are, with their numbers."""
        end = time.monotonic() + timeout_s
        lines = [self._next_line(end, f"{count} words").split() for _ in range(count)]
        return {word: [int(number) for number in numbers] for _, word, *numbers in lines}

    def await_said(self, text: str, timeout_s: float = 60.0) -> None:
        """Waits until the launcher has written this to standard error."""
        end = time.monotonic() + timeout_s
        while text not in self.err:
            assert time.monotonic() < end, f"not said within {timeout_s} s: {text}\n{self.err}"
            time.sleep(0.02)

    def _next_line(self, end: float, waited_for: str) -> str:
        while b"\n" not in self._heard:
            if not select.select([self._reader], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"waited in vain for {waited_for}\n{self.out}\n{self.err}")
            self._heard += os.read(self._reader, 4096)
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code of the launcher."""
        return self.process.wait(timeout_s)

    def gone_after(self, pids: Iterable[int], timeout_s: float = 10.0) -> float:
        """Seconds until the launcher and these processes are gone; a zombie that the launcher should have reaped is still there.

        Time in which not even this process got a turn is the machine's, and does not count.
        """
        begin = time.monotonic()
        stalled_s = 0.0
        waiting = set(pids)
        while self.process.poll() is None or (waiting := {pid for pid in waiting if self._is_there(pid)}):
            assert time.monotonic() - begin < timeout_s, f"still there after {timeout_s} s: {waiting or 'the launcher'}"
            before = time.monotonic()
            time.sleep(_POLL_S)
            late_s = time.monotonic() - before - _POLL_S
            stalled_s += late_s if late_s > _STALL_S else 0.0
        return time.monotonic() - begin - stalled_s

    def _is_there(self, pid: int) -> bool:
        return _is_there(pid, launcher_killed=self.process.returncode == -signal.SIGKILL)

    def members(self) -> list[psutil.Process]:
        """All processes of the job that there are: launcher, guardian, ranks, and what they started."""
        return [process for process in psutil.process_iter() if self._belongs(process)]

    def await_members(self, *words: str, timeout_s: float = 60.0) -> None:
        """Waits until there are processes of the job with these words in their command lines."""
        end = time.monotonic() + timeout_s
        while missing := [word for word in words if not any(word in line for line in self._command_lines())]:
            assert time.monotonic() < end, f"no process of the job has in its command line: {missing}\n{self.err}"
            time.sleep(0.02)

    def _command_lines(self) -> Iterator[str]:
        for process in self.members():
            with suppress(psutil.Error):
                yield " ".join(process.cmdline())

    def _belongs(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get("HORA_TEST_JOB") == str(self.script)
        return False

    def guardian(self) -> psutil.Process:
        """The guardian in office."""
        return next(process for process in psutil.Process(self.pid).children() if "reaper.py" in " ".join(process.cmdline()))

    def guardian_after(self, old: int | None, timeout_s: float = 30.0) -> int:
        """Process of the guardian, once there is another one than `old`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with suppress(StopIteration, psutil.Error):
                if (pid := self.guardian().pid) != old:
                    return pid
        raise AssertionError(f"no new guardian\n{self.err}")

    def left_in_temporary(self) -> list[str]:
        """What lies in the job's TMPDIR."""
        return sorted(os.listdir(self.temporary))

    def close(self) -> None:
        """Kills whatever is left."""
        for process in self.members():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        os.close(self._reader)


def _is_there(pid: int, *, launcher_killed: bool) -> bool:
    try:
        # What a killed launcher leaves is the system's to reap, in its own time.
        process = psutil.Process(pid)
        return not (launcher_killed and process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def starting(directory: Path) -> Iterator["Start"]:
    """A function that starts jobs, which are cleared away at the end."""
    started: list[Job] = []

    def start(body: str, *flags: str, ranks: int = 2, **others: Any) -> Job:
        name = f"job{len(started)}"
        started.append(Job(directory, body, *flags, *(("-np", str(ranks)) if ranks else ()), name=name, **others))
        return started[-1]

    try:
        yield start
    finally:
        for job in started:
            job.close()


Start = Callable[..., Job]


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """Sends a signal."""
    os.kill(pid, signum)
