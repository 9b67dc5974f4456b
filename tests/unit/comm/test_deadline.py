from hora.comm import deadline as module
from hora.comm.deadline import Deadline


def test_deadline_counts_down_to_zero_and_on(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    deadline = Deadline(5.0)
    now[0] = 103.0
    assert (deadline.remaining_s, deadline.waited_s, deadline.passed) == (2.0, 3.0, False)
    now[0] = 107.0
    assert (deadline.remaining_s, deadline.waited_s, deadline.passed) == (0.0, 7.0, True)
