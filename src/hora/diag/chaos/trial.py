"""One job of a trial: started with the launcher in a process of its own, listened to, waited for by what its ranks do, and cleared away."""

import getpass
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hora import env
from hora.diag.chaos.journal import Event, named, read_events
from hora.diag.chaos.settings import Settings
from hora.errors import HoraError
from hora.launch.child import preparation

MARK = "HORA_CHAOS_TRIAL"
"""Variable by which the processes of a trial, and all that they start, are found."""

_LOOK_S, _LOOK_CLOSELY_S = 0.01, 0.002
_DEADLINE_S = 90.0
_SHM = Path("/dev/shm")


class ChaosError(HoraError):
    """A trial did not come to the point where its fault is injected, or did not end."""


class Trial:
    """A job in the directory `place`, which runs `words`."""

    def __init__(self, place: Path, words: Sequence[str], variables: Mapping[str, str]) -> None:
        self.place = place
        self.temporary = place / f"tmp-{secrets.token_hex(4)}"
        self.temporary.mkdir(parents=True)
        self.said: list[tuple[float, str]] = []
        self._token = secrets.token_hex(8)
        self._shm = set(os.listdir(_SHM)) if _SHM.is_dir() else set()
        own = {
            MARK: self._token,
            env.STATE_DIR: str(place / "state"),
            "TMPDIR": str(self.temporary),
            # What PyTorch keeps for itself in TMPDIR, where else it would look like something that the job has left.
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HORA_JOB", "HORA_FAULT", "MASTER_"))}
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            words, env={**inherited, **own, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", preexec_fn=preparation(os.getpid()),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._hear, name="hora-chaos-reader", daemon=True)
        self._reader.start()

    def _hear(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append((time.monotonic(), line.rstrip("\n")))

    @property
    def text(self) -> str:
        """All that has been said on its standard error."""
        return "\n".join(line for _, line in self.said)

    def heard_at(self, pattern: str) -> float | None:
        """When a line with `pattern` was first heard."""
        return next((at_s for at_s, line in list(self.said) if re.search(pattern, line)), None)

    def events(self) -> list[Event]:
        """What its ranks, and those of earlier jobs in this place, have done."""
        return read_events(self.place)

    def wait_for(self, what: str, seen: Callable[[list[Event]], object]) -> list[Event]:
        """The events, as soon as `seen` is true of them.

        Raises:
            ChaosError: it has ended before, or it takes too long.
        """
        end_s = time.monotonic() + _DEADLINE_S
        while not seen(events := self.events()):
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise ChaosError(f"waited in vain for {what}:\n{self.text[-2000:]}")
            time.sleep(_LOOK_S)
        return events

    def held_at(self, update: int, ranks: int = 2) -> list[Event]:
        """The events, as soon as all ranks wait after `update`.

        Raises:
            ChaosError: as of `wait_for`.
        """

        def waits(events: list[Event]) -> bool:
            return len([event for event in named(events, "held") if event.done == update]) == ranks

        return self.wait_for(f"all ranks after update {update}", waits)

    def let_go(self, update: int) -> float:
        """Has the ranks that wait after `update` go on; returns when."""
        at_s = time.monotonic()
        (self.place / f"go-{update}").touch()
        return at_s

    def signal(self, signum: int) -> float:
        """Sends the launcher a signal; returns when."""
        at_s = time.monotonic()
        self.process.send_signal(signum)
        return at_s

    def wait(self, timeout_s: float = _DEADLINE_S) -> int:
        """Its exit code.

        Raises:
            ChaosError: it does not end.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChaosError(f"has not ended after {timeout_s:g} s:\n{self.text[-2000:]}") from None
        self._reader.join(1.0)
        return code

    def members(self) -> list[psutil.Process]:
        """All processes of the job that there are: launcher, guardian, ranks, and what they started."""
        return [process for process in psutil.process_iter() if self._belongs(process)]

    def _belongs(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get(MARK) == self._token and process.status() != psutil.STATUS_ZOMBIE
        return False

    def strike(self, pid: int, signum: int) -> bool:
        """Sends a signal to a process, if there is one of this number that is the job's; whether there was."""
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if self._belongs(process):
                process.send_signal(signum)
                return True
        return False

    def gone_after(self, since_s: float, processes: Sequence[psutil.Process], patience_s: float = 10.0) -> float:
        """Seconds from `since_s` until these processes are gone; infinite if they are still there after so long."""
        while any(_lives(process) for process in processes):
            if time.monotonic() - since_s > patience_s:
                return math.inf
            time.sleep(_LOOK_CLOSELY_S)
        return time.monotonic() - since_s

    def leftovers(self) -> list[str]:
        """Files that the job should have removed, in its directory for temporary files and in shared memory."""
        pids = [str(event.fields["pid"]) for event in self.events() if event.name == "begin"]
        new = set(os.listdir(_SHM)) - self._shm if _SHM.is_dir() else set()
        return [str(path) for path in self.temporary.iterdir()] + [
            name for name in new if "hora" in name or any(pid in name for pid in pids)
        ]

    def clear(self) -> None:
        """Kills whatever is left."""
        for process in self.members():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running(words: Sequence[str], place: Path, **variables: str) -> Iterator[Trial]:
    """Runs `words` in `place` inside the `with` block; none of its processes is left afterwards."""
    trial = Trial(place, words, variables)
    try:
        yield trial
    finally:
        trial.clear()


@contextmanager
def job(
    settings: Settings, *flags: str, ranks: int = 2, fault: str = "", within: Sequence[str] = (), variables: Mapping[str, str] = {}
) -> Iterator[Trial]:
    """Runs the workload with Hora's launcher, in the place that `settings` names; with `within`, words that become the launcher, before it."""
    words = [sys.executable, "-m", "hora.launch", "-np", str(ranks), *flags, "-m", "hora.diag.chaos.workload", settings.to_json()]
    faults = {env.FAULT: fault} if fault else {}
    with heeding_ctrl_c(), running([*within, *words], Path(settings.directory), **faults, **variables) as trial:
        yield trial


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """Launchers that are started inside the `with` block heed Ctrl-C, also where a shell has this process ignore it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
