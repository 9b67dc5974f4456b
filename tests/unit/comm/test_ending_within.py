"""Leaving within a deadline, and graphs that are given back before: what needs no rank."""

import faulthandler
import gc
import subprocess
import sys

import pytest
import torch

from hora.comm import leaving
from hora.exits import FAILED

STUCK_AT_THE_END = """
import atexit, threading, time
from hora.comm import leaving

leaving.LEAST_S = 0.5

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def leave():
    with leaving.ending_within(0.1, 3):
        time.sleep(60)

threading.Thread.start = refuse
atexit.register(leave)
"""


def test_the_deadline_holds_where_python_begins_no_thread_any_more() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK_AT_THE_END], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == FAILED
    assert "in leave" in ended.stderr


def test_nothing_is_to_end_the_process_that_has_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def refuse(_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(leaving.threading.Thread, "start", refuse)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: calls.append("begun"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("ended"))
    with pytest.raises(KeyError), leaving.ending_within(1.0, 0):
        raise KeyError
    assert calls == ["begun", "ended"]


def test_a_graph_that_cannot_be_reset_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[int] = []

    class Graph:
        def __init__(self, number: int) -> None:
            self.number = number

        def reset(self) -> None:
            reset.append(self.number)
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graphs = [Graph(0), Graph(1)]
    assert all(map(gc.is_tracked, graphs))
    leaving.reset_graphs()
    assert sorted(reset) == [0, 1]
