"""Spares that have loaded Python and torch and wait: a generation whose ranks are such processes is there at once.

A spare is started with the command, and with the environment, of the rank that it may come to be, and is held up while its interpreter starts
(`spare`). What it is not told before it is needed is how to reach the others, and where its output goes. Linux only.
"""

import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hora import env
from hora.launch import reaper, spare_hook
from hora.launch.child import start_process
from hora.launch.guardian import Guardian
from hora.launch.job_directory import base_directory, new_name
from hora.launch.plan import RankPlan, fits, is_python, plan_next
from hora.launch.spare import LOAD, READY
from hora.launch.spares import Spares
from hora.log import get_logger

_HOOK = os.fspath(Path(spare_hook.__file__).resolve().parent)
_MOST_BYTES = 1 << 16
_TELL_S, _GONE_S = 1.0, 2.0
# What a spare would run that is not held up.
_PROBE = (sys.executable, "-u", "-c", "raise SystemExit(1)")


class WarmSpares(Spares):
    """Keeps a spare for each rank of this node, as long as there may be another generation than `last_generation`.

    Args:
        on_ready: is told, each time that all spares are ready, how many there are.
    """

    def __init__(self, last_generation: int, on_ready: Callable[[int], None] = lambda _: None) -> None:
        self._last_generation = last_generation
        self._on_ready = on_ready
        self._next_name = new_name()
        self._wanted: deque[RankPlan] = deque()
        self._kept: dict[int, _Spare] = {}
        self._probe: _Spare | None = None
        self._held_up: bool | None = None
        self._guardian: Guardian | None = None
        self._told_ready = False

    @property
    def pids(self) -> Collection[int]:
        """Their processes, and that of the probe."""
        return [spare.process.pid for spare in self._all()]

    def name_directory(self) -> str:
        """The name that the spares for this generation were told."""
        name, self._next_name = self._next_name, new_name()
        return name

    def guard(self, guardian: Guardian | None) -> None:
        """Puts those that there are under guard; between two guardians the kernel ends them with the launcher."""
        self._guardian = guardian
        if guardian is not None:
            for pid in self.pids:
                guardian.add(pid)

    def take(self, plan: RankPlan, stdout: int, stderr: int) -> "subprocess.Popen[bytes] | None":
        """The spare for `plan`, if it is ready."""
        spare = self._kept.pop(plan.rank, None)
        if spare is None:
            return None
        if fits(spare.plan, plan) and spare.ready and spare.become(plan, stdout, stderr):
            return spare.process
        get_logger().debug("rank %d is started cold: its spare was not ready, or is for another", plan.rank)
        self._end([spare])
        return None

    def follow(self, plans: Sequence[RankPlan]) -> None:
        """Plans the spares for the generation after, where there may be one, of what Python runs."""
        self._end(list(self._kept.values()))
        self._kept.clear()
        self._told_ready = False
        job_dir = os.fspath(base_directory().absolute() / self._next_name)
        after = [plan_next(plan, job_dir) for plan in plans if is_python(plan.command) and not plan.descriptors]
        self._wanted = deque(plan for plan in after if int(plan.environ[env.GENERATION]) <= self._last_generation)

    def tend(self) -> None:
        """Starts the next one when the one before is ready: loading is to take one core at most."""
        if any(not spare.ready for spare in self._kept.values()):
            return
        if not self._wanted:
            if self._kept and not self._told_ready:
                self._on_ready(len(self._kept))
            self._told_ready = True
        elif self._hold_up(self._wanted[0]):
            self._add(self._wanted.popleft())

    def reap(self) -> None:
        """Forgets those that have ended; their ranks are started cold."""
        for rank, spare in list(self._kept.items()):
            if spare.process.poll() is not None:
                get_logger().debug("the spare for rank %d has ended with %d", rank, spare.process.returncode)
                self._end([self._kept.pop(rank)])
        if self._probe is not None and (code := self._probe.process.poll()) is not None:
            self._held_up = code == 0
            self._end([self._probe])
            self._probe = None

    def close(self) -> None:
        """Ends all."""
        self._end(self._all())
        self._kept.clear()
        self._wanted.clear()
        self._probe = None

    def _all(self) -> "list[_Spare]":
        return [*self._kept.values(), *([] if self._probe is None else [self._probe])]

    def _hold_up(self, plan: RankPlan) -> bool:
        """Whether Python, in the environment of a rank, is held up as a spare must be: a process that is not would run the script untold.

        It is tried once, with a command that does no harm.
        """
        if self._held_up is None and self._probe is None:
            self._probe = self._start(replace(plan, command=_PROBE))
            if self._probe is not None:
                self._probe.dismiss()
        elif self._held_up is False:
            self._give_up(f"Python does not load {_HOOK} when it starts")
        return bool(self._held_up)

    def _add(self, plan: RankPlan) -> None:
        spare = self._start(plan)
        if spare is not None:
            self._kept[plan.rank] = spare
            spare.load()

    def _start(self, plan: RankPlan) -> "_Spare | None":
        try:
            spare = _Spare(plan)
        except OSError as error:
            self._give_up(f"one cannot be started: {error.strerror}")
            return None
        if self._guardian is not None:
            self._guardian.add(spare.process.pid)
        return spare

    def _give_up(self, why: str) -> None:
        get_logger().debug("no more spares in this generation: %s", why)
        self._wanted.clear()

    def _end(self, spares: "Sequence[_Spare]") -> None:
        for spare in spares:
            spare.dismiss()
            reaper.kill_group(spare.process.pid)
        for spare in spares:
            with suppress(subprocess.TimeoutExpired):  # it waits in the kernel, for a disk; it is reaped like any orphan
                spare.process.wait(_GONE_S)
            if self._guardian is not None:
                self._guardian.discard(spare.process.pid)


class _Spare:
    """A process that may come to be the rank of `plan`, as far as that is known.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self._ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No file and no terminal, as what a rank writes to: streams find out what they lead to when they are made.
        self._said, said = os.pipe()
        os.set_blocking(self._said, False)
        try:
            path = os.pathsep.join(filter(None, [_HOOK, plan.environ.get("PYTHONPATH")]))
            environ = {**plan.environ, "PYTHONPATH": path, env.SPARE: str(theirs.fileno())}
            self.process = start_process(replace(plan, environ=environ, descriptors=(theirs.fileno(),)), said, said)
        except OSError:
            self.dismiss()
            raise
        finally:
            theirs.close()
            os.close(said)

    def load(self) -> None:
        """Has it load what ranks load."""
        with suppress(OSError):  # it is dead
            self._control.send(LOAD)

    @property
    def ready(self) -> bool:
        """Whether it has."""
        if not self._ready:
            with suppress(OSError):
                self._ready = self._control.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self._ready

    def become(self, plan: RankPlan, stdout: int, stderr: int) -> bool:
        """Tells it to be the rank of `plan`; False if it is not there to hear it. What was said while it loaded is said now."""
        told = {name: value for name, value in plan.environ.items() if name not in self.plan.environ}
        self._control.settimeout(_TELL_S)
        try:
            with suppress(BlockingIOError):
                os.write(stderr, os.read(self._said, _MOST_BYTES))
            socket.send_fds(self._control, [json.dumps(told).encode()], [stdout, stderr])
        except OSError:
            return False
        self.dismiss()
        return True

    def dismiss(self) -> None:
        """Lets go of it: one that still waits ends by itself. May be called again."""
        if self._control.fileno() >= 0:
            self._control.close()
            os.close(self._said)
