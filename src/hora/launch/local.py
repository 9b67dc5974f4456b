"""The processes of this node's ranks: starts, signals and kills them, and notices their end.

Each rank leads a session and process group of its own, so that a terminal's Ctrl-C reaches the launcher alone, and so that a rank can be
killed with all that it started. On Linux the kernel kills a rank whose launcher dies; everywhere the guardian does.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from hora.errors import LaunchError
from hora.launch import reaper
from hora.launch.child import on_linux, start_process
from hora.launch.display import Ranks
from hora.launch.guardian import Guardian
from hora.launch.plan import RankPlan
from hora.launch.spares import Spares

_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of what its descendants leave behind, on Linux, so that nothing waits as a zombie for whoever else.

    Inside the `with` block all children of this process are `LocalRanks.reap`'s to take leave of.
    """
    if not on_linux():
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class HasProcesses(Protocol):
    """Whoever has processes of this machine."""

    @property
    def pids(self) -> Collection[int]:
        """Their numbers."""
        ...


class LocalRanks:
    """The ranks of this node, once `start` has been called.

    Args:
        guardian: is told which process groups there are.
        mark: what the environment of everything that ranks start carries; empty where it cannot be looked for.
        others: those who have processes whose end is not to be noticed here.
        spares: processes that ranks may come to be.
    """

    def __init__(self, guardian: Guardian, mark: bytes, others: Sequence[HasProcesses], spares: Spares) -> None:
        self._guardian = guardian
        self._spares = spares
        self._others = others
        self._mark = mark
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._groups: set[int] = set()

    def start(self, plans: Sequence[RankPlan], display: Ranks) -> None:
        """Starts a process for each plan, with its output going to `display`.

        Raises:
            LaunchError: one could not be started; those before it are left for `clear`.
        """
        for plan in plans:
            try:
                self._start(plan, display)
            except OSError as error:
                raise LaunchError(f"rank {plan.rank} could not be started: {plan.command[0]}: {error.strerror}") from error
        self._spares.follow(plans)

    def pid(self, rank: int) -> int:
        """The process of a rank, also when it has ended."""
        return self._processes[rank].pid

    def alive(self) -> list[int]:
        """The ranks whose end has not been noticed."""
        return [rank for rank, process in self._processes.items() if process.returncode is None]

    def reap(self) -> list[tuple[int, int]]:
        """The ranks that have ended since the last time, with their exit codes, negative for a signal. Replaces a guardian that has ended."""
        self._guardian.renew()
        ended = [(rank, code) for rank in self.alive() if (code := self._processes[rank].poll()) is not None]
        self._spares.reap()
        self._reap_orphans()
        self._forget_empty_groups()
        return ended

    def signal(self, signum: int) -> None:
        """Sends a signal to the ranks that live, SIGKILL to their process groups.

        Any other goes to the ranks alone: a data loader's worker that is terminated would spoil the save of its rank.
        """
        send = os.killpg if signum == signal.SIGKILL else os.kill
        for rank in self.alive():
            send(self._processes[rank].pid, signum)

    def catch(self, signum: int) -> bool:
        """Whether all ranks live and have a handler for a signal, which would end one that has none. Told by Linux alone."""
        alive = self.alive()
        return on_linux() and len(alive) == len(self._processes) and all(catches(self._processes[rank].pid, signum) for rank in alive)

    def clear(self) -> list[int]:
        """Kills all that is left of the job on this node and waits for its end; returns the processes that would not go."""
        self.signal(signal.SIGKILL)
        left = reaper.end_processes(self._groups, self._mark, self.reap if on_linux() else None)
        self.reap()  # what died last
        return left

    def _start(self, plan: RankPlan, display: Ranks) -> None:
        with ExitStack() as release:
            stdout, stderr = display.connect(plan.rank)
            release.callback(os.close, stdout)
            release.callback(os.close, stderr)
            process = self._spares.take(plan, stdout, stderr) or start_process(plan, stdout, stderr)
            self._processes[plan.rank] = process
            self._groups.add(process.pid)
            self._guardian.add(process.pid)

    def _reap_orphans(self) -> None:
        if not on_linux():
            return
        own = {self._guardian.pid, *(process.pid for process in self._processes.values())}
        own.update(*(other.pids for other in self._others))
        with suppress(ChildProcessError):
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid not in own:
                os.waitpid(dead.si_pid, os.WNOHANG)

    def _forget_empty_groups(self) -> None:
        """Takes groups that have no process left off the list: their numbers may be given to others."""
        for group in self._groups - {self._processes[rank].pid for rank in self.alive()}:
            if not reaper.kill_group(group, 0):
                self._groups.discard(group)
                self._guardian.discard(group)


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, as the kernel tells."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)
