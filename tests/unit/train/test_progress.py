import io
import logging
import os
import sys
import threading

import pytest
from rich.console import Console
from rich.progress import Progress

from hora import log
from hora.train.progress import Bar, LogLines, Silent, open_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("total", "lines"), [(1000, 10), (25, 10), (10, 10), (7, 7), (1, 1)])
def test_an_epoch_gives_about_ten_lines(caplog, total, lines):
    caplog.set_level("INFO", "hora")
    progress = LogLines(total, "epoch 1/2")
    for step in range(1, total + 1):
        progress.show(step, loss=1.23456, tokens_per_s=12345.6)
    assert len(caplog.messages) == lines
    assert caplog.messages[-1] == f"epoch 1/2: step {total}/{total}  loss 1.235  tokens_per_s 12,346"


def test_no_terminal_means_log_lines():
    with open_progress(3, "epoch", rank=0) as progress:
        assert isinstance(progress, LogLines)


def test_other_ranks_are_silent(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with open_progress(3, "epoch", rank=1) as progress:
        assert isinstance(progress, Silent)
        progress.show(1, loss=1.0)
    assert sys.stderr.getvalue() == ""


def test_a_terminal_gets_a_bar_without_a_thread(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(os.environ, "TERM", "xterm")
    before = threading.active_count()
    with open_progress(3, "epoch 1/2", rank=0) as progress:
        progress.show(3, loss=0.5)
        assert threading.active_count() == before
    assert "epoch 1/2" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert "loss 0.5" in terminal.getvalue()


def test_log_lines_stand_above_the_bar_and_go_their_own_way_afterwards(monkeypatch):
    terminal, stream = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(stream)
    log.get_logger().addHandler(handler)
    try:
        with open_progress(3, "epoch", rank=0):
            log.get_logger().warning("in between")
        log.get_logger().warning("afterwards")
    finally:
        log.get_logger().removeHandler(handler)
    assert "in between" in terminal.getvalue()
    assert stream.getvalue() == "afterwards\n"


def test_a_bar_is_redrawn_ten_times_a_second_and_at_the_end():
    now = [0.0]
    progress = Progress(console=Console(file=io.StringIO()), auto_refresh=False)
    drawn: list[float] = []
    progress.refresh = lambda: drawn.append(now[0])
    bar = Bar(progress, 100, "epoch", clock=lambda: now[0])
    drawn.clear()
    for step in range(1, 101):
        now[0] = step * 0.03
        bar.show(step)
    assert len(drawn) == pytest.approx(100 * 0.03 / 0.12, abs=2)
    assert drawn[-1] == now[0]
