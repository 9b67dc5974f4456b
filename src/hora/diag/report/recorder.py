"""Keeps the marks of the latest steps with their times. What is made of them waits until somebody asks."""

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import torch
from typing_extensions import override

from hora import events
from hora.diag.report.device import DeviceClock, DeviceTimes
from hora.diag.report.slices import Slice, cut
from hora.events import Mark
from hora.plan.buckets import BucketFacts

MOST_STEPS: Final = 1000
"""Steps that are kept, the latest ones."""


@dataclass(slots=True)
class RecordedStep:
    """The marks of one step.

    Attributes:
        begin_s: when the step before had ended, by the host's clock.
        told: the marks, each followed by its time by the host's clock and the bucket that is meant.
        device: when the device came to them; None on CPUs.
    """

    begin_s: float
    told: list[Any]
    device: DeviceTimes | None = None

    @property
    def marks(self) -> list[Mark]:
        """Where this rank was."""
        return self.told[0::3]

    @property
    def host_s(self) -> list[float]:
        """When the host was there."""
        return self.told[1::3]

    @property
    def buckets(self) -> list[BucketFacts | None]:
        """Which bucket each mark means."""
        return self.told[2::3]

    def host_slices(self) -> list[Slice]:
        """Its parts for the host."""
        return cut(self.marks, self.host_s, self.begin_s)

    def timeline(self) -> tuple[list[float], float]:
        """The times of the marks, and that of the beginning, where the step takes place: on the device if there is one."""
        if self.device is not None and self.device.times_s is not None:
            return self.device.times_s, 0.0
        return self.host_s, self.begin_s


class Recorder(events.Observer):
    """Listens to the marks of this rank.

    Attributes:
        warm_up: steps from the beginning that are to be left out.
        steps: the latest ones.
        num_steps: since the beginning.
    """

    needs_eager_steps = False

    def __init__(self, warm_up: int) -> None:
        self.begin(warm_up)

    def begin(self, warm_up: int) -> None:
        """Begins anew."""
        self.warm_up = warm_up
        self.steps: deque[RecordedStep] = deque(maxlen=MOST_STEPS)
        self.num_steps = 0
        self._begin_s = perf_counter()
        self._told: list[Any] = []

    @override
    def on_mark(self, mark: Mark, bucket: Any = None) -> None:
        super().on_mark(mark, bucket)
        # One flat list: an object for each mark would have the garbage collector walk through all that torch has, again and again.
        self._told += (mark, perf_counter(), bucket)
        if mark is Mark.UPDATE_END:
            self._end_step()

    def settle(self) -> None:
        """Has all times; on a GPU waits for the device."""

    def _end_step(self) -> None:
        marks = self._told[0::3]
        if Mark.SUMS_END not in marks and Mark.REPLAY_END not in marks:
            return  # a second optimizer of the same model applies the same sums: what it takes counts with the next step
        step = RecordedStep(self._begin_s, self._told, self._device_times())
        self._begin_s, self._told = self._told[-2], []
        self.steps.append(step)
        self.num_steps += 1

    def _device_times(self) -> DeviceTimes | None:
        return None


class DeviceRecorder(Recorder):
    """Listens to the marks of a rank with a GPU."""

    @override
    def begin(self, warm_up: int) -> None:
        super().begin(warm_up)
        self._clock = DeviceClock()

    @override
    def on_mark(self, mark: Mark, bucket: Any = None) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # a step that the script captures itself
        self._clock.stamp(mark)
        super().on_mark(mark, bucket)

    @override
    def settle(self) -> None:
        self._clock.read_all()

    @override
    def _device_times(self) -> DeviceTimes:
        return self._clock.end_step()
