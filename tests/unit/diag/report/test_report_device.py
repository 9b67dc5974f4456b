"""The GPU's part with events that a test moves on: nothing waits for a device, and nothing is read before it is there."""

from dataclasses import dataclass

import pytest
import torch

from hora.diag.report.rank_record import HOST_BOUND, REPLAYED, make_record
from hora.diag.report.recorder import DeviceRecorder
from hora.diag.report.slices import Part
from hora.diag.report.trace import make_trace
from hora.events import Mark

STEP = [Mark.DATA_BEGIN, Mark.DATA_END, Mark.WINDOW_BEGIN, Mark.LAST_BACKWARD, Mark.BACKWARD_END, Mark.SUMS_END, Mark.UPDATE_END]


@dataclass
class Device:
    """When the marks to come are reached, and how far the device is by now."""

    now_s: float = 0.0
    reached_s: float = 0.0
    made: int = 0
    synchronized: int = 0
    capturing: bool = False


class Event:
    device = Device()

    def __init__(self, enable_timing):
        assert enable_timing
        self.device.made += 1

    def record(self):
        self.at_s = self.device.now_s

    def query(self):
        return self.at_s <= self.device.reached_s

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        return 1e3 * (other.at_s - self.at_s)


@pytest.fixture
def device(monkeypatch):
    Event.device = device = Device()

    def synchronize():
        device.synchronized += 1
        device.reached_s = device.now_s

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    return device


def train(recorder, device, *, lag_s, pieces_s=(0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 1.0)):
    for mark, piece_s in zip(STEP, pieces_s, strict=True):
        device.now_s += piece_s
        device.reached_s = device.now_s - lag_s
        recorder.on_mark(mark)


def test_times_are_those_of_the_device_and_read_when_it_has_passed(device):
    recorder = DeviceRecorder(0)
    for _ in range(20):
        train(recorder, device, lag_s=20.0)
    assert device.synchronized == 0
    assert sum(step.device.times_s is None for step in recorder.steps) == 3, "the device is that far behind"
    assert device.made < 50, "events are used again"
    recorder.settle()
    record = make_record("a", recorder)
    assert device.synchronized == 1
    assert record.steps[:, : len(Part)].tolist() == [[0.0, 1.0, 3.0, 0.0, 3.0, 1.0, 0.0]] * 20
    assert record.steps[:, REPLAYED].sum() == 0


@pytest.mark.parametrize(("lag_s", "bound"), [(0.0, True), (5.0, False)])
def test_a_device_close_behind_its_host_waits_for_it(device, monkeypatch, lag_s, bound):
    # The clock of the host goes with the device's.
    monkeypatch.setattr("hora.diag.report.recorder.perf_counter", lambda: device.now_s)
    recorder = DeviceRecorder(0)
    for _ in range(4):
        train(recorder, device, lag_s=lag_s)
    recorder.settle()
    assert make_record("a", recorder).steps[:, HOST_BOUND].tolist() == [float(bound)] * 4


def test_a_device_that_takes_longer_than_its_host_does_not_wait(device):
    recorder = DeviceRecorder(0)  # whose host takes microseconds
    train(recorder, device, lag_s=0.0)
    recorder.settle()
    assert make_record("a", recorder).steps[:, HOST_BOUND].tolist() == [0.0]


def test_marks_inside_a_capture_are_not_heard(device):
    recorder = DeviceRecorder(0)
    device.capturing = True
    train(recorder, device, lag_s=0.0)
    assert (recorder.num_steps, len(recorder.steps)) == (0, 0)


def test_a_trace_has_a_row_for_the_device(device):
    recorder = DeviceRecorder(0)
    for _ in range(3):
        train(recorder, device, lag_s=1.0)
    recorder.settle()
    trace = make_trace(recorder, ())
    assert sorted(set(trace.rows[:, 0].tolist())) == [0.0, 1.0]
    on_device = trace.rows[trace.rows[:, 0] == 1]
    assert (on_device[:, 4] - on_device[:, 3]).sum() == pytest.approx(3 * 8.0)
    assert (on_device[1:, 3] - on_device[:-1, 4]).abs().max() < 1e-5, "without gaps"
