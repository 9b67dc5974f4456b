"""Looking for hosts while a job runs; the agents are programs of a few lines, and the launcher around it is in tests/faults."""

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from hora.errors import ConfigError
from hora.launch import host_scout, wire
from hora.launch.guardian import Guardian
from hora.launch.host_scout import HostScout
from hora.launch.hosts import Host
from hora.launch.options import LaunchOptions
from hora.launch.remote import Remote

HOSTS = (Host("alpha", 1), Host("beta", 1))
ANSWER = "import sys; sys.stdout.buffer.write({!r}); sys.stdout.flush(); sys.stdin.read()"
GOOD = ANSWER.format(wire.GREETING + wire.pack_message({"cores": 1}))
LACKING = ANSWER.format(wire.GREETING + wire.pack_message({"refused": "no script", "config": True}))
DEAD, SILENT = "import sys; sys.exit('No route to host')", "import time; time.sleep(600)"


class Land:
    """What is found at each host, a program; and how often somebody went there."""

    def __init__(self) -> None:
        self.programs: dict[str, str] = {}
        self.visits: list[str] = []

    def dial(self, _: LaunchOptions, name: str) -> Remote:
        self.visits.append(name)
        return Remote(name, [sys.executable, "-S", "-c", self.programs[name]], "python")


@pytest.fixture
def land(monkeypatch: pytest.MonkeyPatch) -> Land:
    land = Land()
    monkeypatch.setattr(host_scout, "dial", land.dial)
    return land


Make = Callable[..., HostScout]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[HostScout] = []
    before = len(os.listdir("/proc/self/fd"))

    def make(**options: Any) -> HostScout:
        defaults: dict[str, Any] = {"hosts": HOSTS, "min_ranks": 1, "max_ranks": 2, "discovery_interval_s": 0.01}
        made.append(HostScout(LaunchOptions("t.py", **defaults | options)))
        return made[-1]

    yield make
    for scout in made:
        scout.close()
        assert not scout.pids
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [child for child in psutil.Process().children() if "time.sleep(600)" in " ".join(child.cmdline())]


def begin(scout: HostScout, *lost: int) -> tuple[str, ...]:
    """Begins a generation after the loss of hosts; returns those of it."""
    options = LaunchOptions("t.py", hosts=HOSTS)
    mustered = scout.muster(options, lost)
    assert mustered is not None
    return tuple(host.name for host in mustered.hosts)


def tend_until(scout: HostScout, done: Callable[[], bool], timeout_s: float = 60.0, now: float | None = None) -> list[bool]:
    """Lets it look around, at the time `now` or as time passes; returns what it said."""
    said, end = [], time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end
        said.append(scout.tend(now or time.monotonic()))
        time.sleep(0.002)
    return said


def test_a_host_that_answers_again_is_a_reason_to_regroup(land: Land, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    land.programs["beta"] = DEAD
    scout = make()
    assert begin(scout, 1) == ("alpha",)
    assert not any(tend_until(scout, lambda: len(land.visits) == 3))
    land.programs["beta"] = GOOD
    wanted: list[bool] = []
    tend_until(scout, lambda: bool(wanted.append(scout.tend(time.monotonic())) or wanted[-1]))
    said = capsys.readouterr().err  # on a slow machine it has asked twice
    assert said.startswith("hora: beta can be used: the ranks are asked to save and to end (SIGUSR1), to go on as 2\n")
    assert begin(scout) == ("alpha", "beta")
    assert set(land.visits) == {"beta"}


def test_a_host_that_lacks_something_is_not_taken_in(land: Land, make: Make) -> None:
    land.programs["beta"] = LACKING
    scout = make()
    begin(scout, 1)
    assert not any(tend_until(scout, lambda: len(land.visits) == 3))


def test_ranks_that_do_not_end_are_asked_again_but_less_and_less_often_and_that_is_said_once(
    land: Land, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    land.programs["beta"] = GOOD
    scout = make(discovery_interval_s=10.0)
    begin(scout, 1)
    asked_at = times_asked(scout, time.monotonic(), 100)
    waits = [round(second - first) for first, second in itertools.pairwise(asked_at)]
    assert waits == [20, 40]
    said = capsys.readouterr().err
    assert said.count("beta can be used") == 1
    assert said.count("the ranks have not ended yet") == 1


def times_asked(scout: HostScout, now: float, seconds: int) -> list[float]:
    """When it asks the ranks to end, on a clock of the test's, but for the moment that a host needs to answer."""
    asked_at, end = [], now + seconds
    while now < end:
        asked_at += [now] if scout.tend(now) else []
        if scout.pids:
            time.sleep(0.002)
        else:
            now += 1.0
    return asked_at


def test_ranks_that_never_end_soon_are_told_of_once_for_all_generations_and_then_by_the_hour(
    land: Land, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    land.programs["beta"] = GOOD
    scout, now = make(discovery_interval_s=10.0), time.monotonic()
    for _ in range(3):
        begin(scout, 1)
        assert len(times_asked(scout, now, 100)) >= 2
    assert capsys.readouterr().err.count("the ranks have not ended yet") == 1
    assert len(times_asked(scout, now + 3700.0, 3600)) > 2
    assert capsys.readouterr().err.count("the ranks have not ended yet") == 1


def test_a_silent_host_holds_up_nothing_and_is_given_up(land: Land, make: Make) -> None:
    land.programs["beta"] = SILENT
    scout = make()
    begin(scout, 1)
    before = now = time.monotonic()
    tend_until(scout, lambda: bool(scout.pids))
    for _ in range(100):
        assert not scout.tend(now)
    assert (land.visits, len(scout.pids)) == (["beta"], 1)
    for after_s in (61.0, 62.0):
        assert not scout.tend(now + after_s)
    assert time.monotonic() - before < 30.0
    assert land.visits == ["beta", "beta"]


def test_a_host_that_has_come_waits_for_others_that_may_be_about_to(land: Land, make: Make) -> None:
    land.programs |= {"alpha": SILENT, "beta": GOOD}
    scout = make(hosts=(*HOSTS, Host("gamma", 1)), max_ranks=3, discovery_interval_s=10.0)
    options = LaunchOptions("t.py", hosts=(*HOSTS, Host("gamma", 1)))
    assert scout.muster(options, [0, 1]) is not None
    due = time.monotonic() + 10.0
    tend_all = [scout.tend(due)]
    while len(scout.pids) != 1:
        time.sleep(0.002)
        tend_all.append(scout.tend(due))
    assert sorted(land.visits) == ["alpha", "beta"]
    assert not any(tend_all)
    assert scout.tend(due + 11.0)


@dataclass
class Guarded:
    """A guardian that writes down whom it guards."""

    groups: set[int] = field(default_factory=set)

    def add(self, group: int) -> None:
        self.groups.add(group)

    def discard(self, group: int) -> None:
        self.groups.discard(group)


def test_what_is_under_way_is_under_guard(land: Land, make: Make) -> None:
    land.programs |= {"alpha": SILENT, "beta": GOOD}
    scout = make(discovery_interval_s=10.0)
    scout.muster(LaunchOptions("t.py", hosts=HOSTS), [1])
    now = time.monotonic() + 10.0
    scout.tend(now)
    assert len(scout.pids) == 1
    guardian = Guarded()
    scout.guard(cast("Guardian", guardian))  # of the generation that begins
    assert guardian.groups == set(scout.pids)
    tend_until(scout, lambda: not scout.pids, now=now)
    assert guardian.groups == set()


def test_not_all_hosts_are_asked_at_once(land: Land, make: Make) -> None:
    hosts = tuple(Host(f"h{number}", 1) for number in range(20))
    land.programs |= {host.name: SILENT for host in hosts}
    scout = make(hosts=hosts, max_ranks=20)
    assert scout.muster(LaunchOptions("t.py", hosts=hosts), range(19)) is not None
    now = time.monotonic() + 1.0
    for _ in range(3):
        assert not scout.tend(now)
    assert len(scout.pids) == 8
    assert not scout.tend(time.monotonic() + 61.0)
    assert len(scout.pids) == 8
    assert len(set(land.visits)) == 16


def test_without_max_ranks_nobody_is_asked(land: Land, make: Make) -> None:
    scout = make(max_ranks=None, max_restarts=1)
    assert begin(scout, 1) == ("alpha",)
    assert scout.deadline is None
    assert not scout.tend(time.monotonic() + 1e6)
    assert land.visits == []


def test_the_command_that_fails_later_is_complained_of_once(
    land: Land, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = tmp_path / "listed"
    listed.write_text("alpha\n")
    land.programs["beta"] = GOOD
    scout = make(hosts=(), host_discovery=("cat", str(listed)))
    options = scout.muster(LaunchOptions("t.py", host_discovery=("cat",), min_ranks=1))
    assert options is not None
    assert options.hosts == (Host("alpha", 1),)
    with caplog.at_level(logging.WARNING, "hora"):
        listed.unlink()
        deadline = time.monotonic() + 0.5
        tend_until(scout, lambda: time.monotonic() > deadline)
    assert len([record for record in caplog.records if "the hosts that it named before are kept" in record.message]) == 1
    listed.write_text("alpha\nbeta\n")
    wanted: list[bool] = []
    tend_until(scout, lambda: bool(wanted.append(scout.tend(time.monotonic())) or wanted[-1]))


def test_the_command_must_answer_at_the_first_start(make: Make) -> None:
    with pytest.raises(ConfigError, match="but ended with exit code 1"):
        make(hosts=(), host_discovery=("false",)).muster(LaunchOptions("t.py", host_discovery=("false",), min_ranks=1))


def test_it_waits_for_enough_hosts(land: Land, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    land.programs["beta"] = GOOD
    assert begin(make(min_ranks=2), 1) == ("alpha", "beta")
    assert "there are hosts for fewer than --min-ranks 2: waits up to 300 s for others" in capsys.readouterr().err
