import os
import subprocess
import sys
import threading

import pytest

from hora import events
from hora.testing import guards
from hora.testing.guards import Guard


@pytest.fixture(autouse=True)
def hasty(monkeypatch, tmp_path):
    monkeypatch.setattr(guards, "_PATIENCE_S", 0.05)
    monkeypatch.chdir(tmp_path)


def test_nothing_changed_leaves_nothing():
    assert Guard.take().leaks() == []


def test_variables_that_were_set_changed_or_removed_are_named(monkeypatch):
    monkeypatch.setenv("CHANGED", "a")
    monkeypatch.setenv("REMOVED", "b")
    guard = Guard.take()
    monkeypatch.setenv("CHANGED", "c")
    monkeypatch.delenv("REMOVED")
    monkeypatch.setenv("SET", "d")
    assert guard.leaks() == [
        "variable CHANGED = 'c', which was 'a'",
        "variable REMOVED = None, which was 'b'",
        "variable SET = 'd', which was None",
    ]


def test_thread_that_still_runs_is_named_and_one_that_ends_is_not():
    guard, done = Guard.take(), threading.Event()
    thread = threading.Thread(target=done.wait, name="straggler")
    thread.start()
    try:
        assert guard.leaks() == ["thread straggler"]
    finally:
        done.set()
        thread.join()
    assert guard.leaks() == []


@pytest.mark.parametrize("listed", [True, False])
def test_child_process_is_named(monkeypatch, tmp_path, listed):
    """Where Linux lists the children, and where it does not."""
    if not listed:
        monkeypatch.setattr(guards, "_CHILDREN", tmp_path / "nothing")
    guard = Guard.take()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (leak,) = guard.leaks()
        assert leak.startswith(f"process {child.pid}")
    finally:
        child.communicate()
    assert guard.leaks() == []


def test_child_process_of_a_thread_is_named():
    guard, children, done = Guard.take(), [], threading.Event()

    def start() -> None:
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        done.wait()

    thread = threading.Thread(target=start)
    thread.start()
    try:
        while not children:
            assert thread.is_alive()
        assert any(leak.startswith(f"process {children[0].pid}") for leak in guard.leaks())
    finally:
        done.set()
        thread.join()
        children[0].communicate()
    assert guard.leaks() == []


def test_file_in_the_working_directory_is_named(tmp_path):
    guard = Guard.take()
    (tmp_path / "stray.txt").touch()
    assert guard.leaks() == [f"file {tmp_path / 'stray.txt'}"]


def test_another_working_directory_is_named(tmp_path, monkeypatch):
    guard = Guard.take()
    (tmp_path / "deeper").mkdir()
    os.chdir("deeper")
    assert f"working directory {tmp_path / 'deeper'}, which was {tmp_path}" in guard.leaks()
    monkeypatch.chdir(tmp_path)


class Listener(events.Observer):
    pass


def test_a_listener_to_the_steps_left_behind_is_named() -> None:
    guard = Guard.take()
    with events.observe(Listener()):
        (leak,) = guard.leaks()
    assert leak.endswith("who listens to the steps")
    assert guard.leaks() == []
