"""Launchers that ask each other where their ranks stand, without processes: who is asked, who decides, and what of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hora.launch import watcher as module
from hora.launch.deadlines import Deadlines
from hora.launch.job_events import HangFound, Shared
from hora.launch.meeting import Line
from hora.launch.standing import StandingsAsked, StandingsTold
from hora.launch.watch import LOOK_S, Sight, Watch
from hora.launch.watcher import Watcher
from hora.pulse import Doing, Section, Words

WAITING = Words(1, Section.STEP, Doing.CALL, 20, 7, 6, 7, "all_reduce", 0.0, 0.0, 1, 300.0)
BUSY = replace(WAITING, doing=Doing.WORK, begun=6, call=0, kind="")


class StillLife:
    """Ranks that do nothing more."""

    debugged = False

    def __init__(self, sights: Sequence[Sight]) -> None:
        self._sights = list(sights)

    def look(self) -> list[Sight]:
        return self._sights

    def stacks(self, sights: Sequence[Sight]) -> dict[int, str]:
        return {sight.rank: f'Current thread 0x1\n  File "a.py", line {sight.rank} in hang\n' for sight in sights}

    def is_debugged(self, sight: Sight, stacks: str) -> bool:
        return self.debugged


class Nodes:
    """Watchers of nodes whose ranks stand still, on a line that brings everything to all of them in one order, and on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ranks: Sequence[Words]) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.said: list[Shared] = []
        self._undelivered: list[Shared] = []
        self.lives, self.watchers, first = [], [], 0
        for node, words in enumerate(ranks):
            self.lives.append(StillLife([Sight(first + index, 1, "S", each) for index, each in enumerate(words)]))
            first += len(words)
            watch = Watch(Deadlines.read("step=5,evaluation=20"), f"host{node}")
            self.watchers.append(Watcher(watch, self.lives[-1], Line(self._undelivered.append), node, len(ranks), Path("hang")))  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> list[HangFound]:
        """What is found out in so many seconds."""
        found = []
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            found += [hang for watcher in self.watchers if (hang := watcher.tick(self.now)) is not None]
            while self._undelivered:
                event = self._undelivered.pop(0)
                self.said.append(event)
                assert isinstance(event, StandingsAsked | StandingsTold)
                found += [hang for watcher in self.watchers if (hang := watcher.handle(event, self.now)) is not None]
        return found


def test_a_hang_is_found_by_one_launcher_who_blames_the_right_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, [WAITING, WAITING], [WAITING, BUSY], [])
    (hang,) = nodes.pass_time(8.0)
    assert hang.rank == 3
    assert "rank 3 on host1" in hang.report
    assert "a.py:3 in hang" in hang.report
    assert hang.details.count("Current thread") == 4
    assert sum(isinstance(event, StandingsTold) for event in nodes.said) == 3


def test_a_launcher_whose_ranks_wait_is_told_that_it_takes_longer_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, [WAITING], [replace(BUSY, section=Section.EVALUATION, doing=Doing.OWN)])
    assert nodes.pass_time(18.0) == []
    assert 1 < sum(isinstance(event, StandingsAsked) for event in nodes.said) <= 4
    (hang,) = nodes.pass_time(15.0)[:1]
    assert hang.rank == 1


def test_a_launcher_that_does_not_answer_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, [WAITING, BUSY], [WAITING])
    del nodes.watchers[1]
    (hang,) = nodes.pass_time(10.0)
    assert hang.rank == 1


def test_a_job_under_a_debugger_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, [WAITING, BUSY])
    nodes.lives[0].debugged = True
    assert nodes.pass_time(60.0) == []


def test_a_quiet_job_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, [WAITING, BUSY])
    assert nodes.pass_time(4.5) == []
    assert nodes.said == []
