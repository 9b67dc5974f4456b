"""What happens in a run, told to whoever listens, and named points where a fault can be injected.

Both are null objects until somebody replaces them: `observe` installs an `Observer`, the variable `HORA_FAULT` (see `env`) arms fault
points. Marks also go to the page that the launcher reads (`pulse`). `when_joined` is for who listens to a job from its beginning. Relies on nothing
but the standard library; does not decide anything.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import partial
from typing import Any

from hora import env, pulse
from hora.errors import ConfigError
from hora.pulse import Doing


class Mark(IntEnum):
    """Where this rank is in its step, which begins when the one before has ended."""

    DATA_BEGIN = auto()
    """A loader is asked for what comes next, and waited for."""
    DATA_END = auto()
    WINDOW_BEGIN = auto()
    """The micro-batches of an update begin."""
    LAST_BACKWARD = auto()
    """The last backward begins, and the other ranks have been told so."""
    AGREE_BEGIN = auto()
    """The other ranks' word is waited for."""
    AGREE_END = auto()
    BUCKET_SENT = auto()
    """The sum of a bucket has begun."""
    BACKWARD_END = auto()
    """The last backward has ended; what has not arrived is waited for from here on."""
    BUCKET_SUMMED = auto()
    """The sum of a bucket was waited for."""
    SUMS_END = auto()
    """All sums have been waited for."""
    GATHER_BEGIN = auto()
    """Parameters that other ranks have updated are waited for."""
    GATHER_END = auto()
    DEVICE_BEGIN = auto()
    """The host, too far ahead, waits for the device."""
    DEVICE_END = auto()
    REPLAY_BEGIN = auto()
    """A whole step is started as a CUDA graph."""
    REPLAY_END = auto()
    UPDATE_END = auto()
    """The update was made, and the step has ended."""


_page = pulse.mine()
# What the launcher is told at each mark; where there is nothing to tell, that the rank gets on. In a list, which is quicker than a dictionary.
_TOLD: list[Callable[[], None]] = [_page.rest] * (max(Mark) + 1)
_TOLD[Mark.DATA_BEGIN] = partial(_page.turn_to, Doing.DATA)
_TOLD[Mark.AGREE_BEGIN] = _TOLD[Mark.GATHER_BEGIN] = partial(_page.turn_to, Doing.WAIT)
_TOLD[Mark.DEVICE_BEGIN] = partial(_page.turn_to, Doing.DEVICE)
_TOLD[Mark.WINDOW_BEGIN] = _TOLD[Mark.LAST_BACKWARD] = _TOLD[Mark.SUMS_END] = _page.begin_step
_TOLD[Mark.BACKWARD_END] = _page.await_sums
_TOLD[Mark.UPDATE_END] = _page.end_step


class Observer:
    """Listener with a method for each kind of event; each does nothing, but that `on_mark`, which subclasses call too, tells the launcher.

    Subclasses override what they want to know.

    Attributes:
        needs_eager_steps: whether it listens to what is inside a step, of which nothing is heard when a CUDA graph is replayed.
    """

    needs_eager_steps = True

    def on_samples(self, *, epoch: int, step: int, micro_step: int, indices: Sequence[int]) -> None:
        """A micro-batch with the samples `indices` of the data set was handed to this rank."""

    def on_gradient(self, *, name: str, gradient: Any) -> None:
        """The gradient of the parameter `name` is final: the one of the whole global batch."""

    def on_collective(self, *, kind: str, sequence: int, size_bytes: int, phase: str) -> None:
        """Collective number `sequence` of this rank was begun or ended (`phase` is "begin" or "end")."""

    def on_step(self, *, step: int, values: dict[str, float]) -> None:
        """An update was applied."""

    def on_mark(self, mark: Mark, bucket: Any = None) -> None:  # noqa: ARG002
        """This rank has come to `mark` of its step; `bucket` (`plan.buckets.BucketFacts`) says which one is meant."""
        _TOLD[mark]()


_observer: Observer = Observer()


def observer() -> Observer:
    """The listener in force."""
    return _observer


@contextmanager
def observe(listener: Observer) -> Iterator[Observer]:
    """Makes `listener` the one in force inside the `with` block."""
    global _observer
    before, _observer = _observer, listener
    try:
        yield listener
    finally:
        _observer = before


_at_joining: list[Callable[[], None]] = []


def when_joined(act: Callable[[], None]) -> None:
    """Has `act` called whenever this process has joined a job, from now on."""
    _at_joining.append(act)


def tell_joined() -> None:
    """This process has joined a job."""
    for act in _at_joining:
        act()


@dataclass(frozen=True)
class Fault:
    """One fault to inject: when `rank` reaches `point`, do `act` (a signal's name, `raise`, or `exit=CODE`); in each start of a job, or in one."""

    rank: int
    point: str
    act: str
    generation: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Reads `rank=1,point=step.3.before,act=SIGKILL`.

        Raises:
            ConfigError: a field is missing, unknown or of the wrong type.
        """
        try:
            fields = dict(part.split("=", 1) for part in text.strip().split(","))
            generation = fields.pop("generation", None)
            return cls(
                rank=int(fields.pop("rank")),
                point=fields.pop("point"),
                act=fields.pop("act"),
                generation=None if generation is None else int(generation),
                **fields,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{env.FAULT} must read rank=N,point=NAME,act=SIGNAL|raise|exit=CODE[,generation=N], but is {text!r} instead"
            ) from error

    def strike(self) -> None:
        """Does what was asked to this process."""
        sys.stderr.write(f"injected fault: rank {self.rank} at {self.point}: {self.act}\n")
        sys.stderr.flush()
        if self.act == "raise":
            raise RuntimeError(f"injected fault at {self.point}")
        if self.act.startswith("exit="):
            os._exit(int(self.act.removeprefix("exit=")))
        os.kill(os.getpid(), getattr(signal, self.act))


def _armed() -> dict[str, list[Fault]]:
    points: dict[str, list[Fault]] = {}
    for text in filter(None, os.environ.get(env.FAULT, "").split(";")):
        fault = Fault.parse(text)
        if fault.generation not in (None, env.JobEnv.read().generation):
            continue
        points.setdefault(fault.point, []).append(fault)
    return points


_faults: dict[str, list[Fault]] = _armed()


def arm_faults() -> None:
    """Reads `HORA_FAULT` again, for a process whose environment changed after this module was loaded."""
    _faults.clear()
    _faults.update(_armed())


def fault_point(name: str, *, rank: int) -> None:
    """Marks a place where a fault can strike `rank`; does nothing unless one is armed there.

    Names read from the large to the small: `step.3.before`, `step.3.after`, `checkpoint.written`, `checkpoint.committed`, `init.met`, `init.joined`,
    `collective.7`, `object.written`.
    """
    if not _faults:
        return
    for fault in _faults.get(name, ()):
        if fault.rank == rank:
            fault.strike()
