"""Spares: what is known of a rank before its time, and what a process does while it waits. Those that a job has are in `faults`."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hora import env
from hora.errors import ConfigError
from hora.launch import spare, warm_spares
from hora.launch.hosts import Host
from hora.launch.options import LaunchOptions
from hora.launch.plan import RankPlan, fits, is_python, plan_next
from hora.launch.warm_spares import WarmSpares

ENVIRON = {
    "RANK": "0",
    "OMP_NUM_THREADS": "2",
    env.GENERATION: "3",
    env.JOB_DIR: "/tmp/hora-job-3",
    env.RENDEZVOUS: "unix:///tmp/hora-job-3/s",
    env.KEY_FILE: "/tmp/hora-job-3/key",
    "MASTER_PORT": "1234",
}
PLAN = RankPlan(0, 0, (sys.executable, "-u", "train.py"), ENVIRON)
LATER = {
    env.GENERATION: "4",
    env.JOB_DIR: "/tmp/hora-job-4",
    env.RENDEZVOUS: "unix:///tmp/hora-job-4/s",
    env.KEY_FILE: "/tmp/hora-job-4/key",
}


def test_of_the_next_generation_is_known_what_is_not_made_when_it_begins() -> None:
    assert plan_next(PLAN, "/tmp/hora-job-4").environ == {
        "RANK": "0",
        "OMP_NUM_THREADS": "2",
        env.GENERATION: "4",
        env.JOB_DIR: "/tmp/hora-job-4",
    }


@pytest.mark.parametrize(
    ("change", "does"),
    [
        ({}, True),
        ({"environ": ENVIRON | LATER | {"OMP_NUM_THREADS": "1"}}, False),
        ({"environ": {name: value for name, value in (ENVIRON | LATER).items() if name != "OMP_NUM_THREADS"}}, False),
        ({"environ": ENVIRON | LATER | {env.JOB_DIR: "/tmp/hora-job-5"}}, False),
        ({"command": (sys.executable, "-u", "other.py")}, False),
        ({"cores": frozenset({1})}, False),
        ({"descriptors": (5,)}, False),
    ],
)
def test_a_spare_is_for_the_rank_that_was_known(change: dict[str, object], does: bool) -> None:
    plan = replace(PLAN, environ=ENVIRON | LATER)
    assert fits(plan_next(PLAN, "/tmp/hora-job-4"), replace(plan, **change)) is does  # type: ignore[arg-type]


def test_only_what_this_python_runs_is_waited_with() -> None:
    assert is_python([sys.executable, "-u", "-m", "package.train"])
    assert not is_python(["/bin/sh", "-u", "train.sh"])
    assert not is_python(["/elsewhere/python", "-u", "train.py"])


@pytest.mark.parametrize("others", [{}, {"max_restarts": 1, "hosts": (Host("a"),)}])
def test_spares_are_refused_where_there_is_no_next_start_for_them(others: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--warm-spares .* needs --max-restarts, and goes without -H"):
        LaunchOptions("train.py", warm_spares=True, **others)  # type: ignore[arg-type]


Tended = Callable[[Sequence[RankPlan]], WarmSpares]


@pytest.fixture
def plan(tmp_path: Path) -> RankPlan:
    """Of a rank whose script leaves a file, with an empty module for torch."""
    (tmp_path / "torch.py").touch()
    (tmp_path / "train.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return RankPlan(0, 0, (sys.executable, "-u", str(tmp_path / "train.py")), {**os.environ, **ENVIRON, "PYTHONPATH": path})


@pytest.fixture
def told() -> list[int]:
    return []


@pytest.fixture
def spares(told: list[int]) -> Iterator[WarmSpares]:
    with closing(WarmSpares(4, told.append)) as spares:
        yield spares


def tend(spares: WarmSpares, until: Callable[[], object]) -> None:
    """Does what a launcher does, for as long as it takes."""
    end = time.monotonic() + 60.0
    while not until():
        assert time.monotonic() < end
        spares.tend()
        spares.reap()
        time.sleep(0.005)


def of_this_generation(plan: RankPlan, spares: WarmSpares) -> RankPlan:
    directory = warm_spares.base_directory().absolute() / spares.name_directory()
    return replace(plan, environ={**plan.environ, **LATER, env.JOB_DIR: str(directory)})


def test_a_spare_becomes_the_rank_and_speaks_where_it_is_told_to(
    spares: WarmSpares, plan: RankPlan, told: list[int], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        f"import os, sys\nprint(os.environ[{env.KEY_FILE!r}])\nprint('torch' in sys.modules, file=sys.stderr)\n"
    )
    spares.follow([plan])
    tend(spares, until=lambda: told)
    assert told == [1]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = spares.take(of_this_generation(plan, spares), out.fileno(), err.fileno())
    assert process is not None
    assert process.pid not in spares.pids
    assert process.wait(60.0) == 0
    assert (tmp_path / "out").read_text() == LATER[env.KEY_FILE] + "\n"
    assert (tmp_path / "err").read_text() == "True\n"


def test_a_spare_for_another_rank_is_ended(spares: WarmSpares, plan: RankPlan, told: list[int], tmp_path: Path) -> None:
    spares.follow([plan])
    tend(spares, until=lambda: told)
    (pid,) = spares.pids
    assert spares.take(replace(of_this_generation(plan, spares), cores=frozenset({0})), 1, 2) is None
    assert spares.pids == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not (tmp_path / "ran").exists()


def test_there_are_none_for_a_generation_that_may_not_be(spares: WarmSpares, plan: RankPlan) -> None:
    spares.follow([replace(plan, environ={**plan.environ, env.GENERATION: "4"})])
    spares.tend()
    assert spares.pids == []


def test_there_are_none_for_programs_and_ranks_of_mpi(spares: WarmSpares, plan: RankPlan) -> None:
    spares.follow([replace(plan, command=("/bin/true",)), replace(plan, descriptors=(0,))])
    spares.tend()
    assert spares.pids == []


def test_a_python_that_cannot_be_held_up_runs_no_script(
    spares: WarmSpares, plan: RankPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm_spares, "_HOOK", str(tmp_path / "nothing"))
    caplog.set_level("DEBUG", logger="hora")
    spares.follow([plan])
    tend(spares, until=lambda: "no more spares in this generation" in caplog.text)
    spares.tend()
    assert spares.pids == []
    assert not (tmp_path / "ran").exists()


def test_a_spare_ends_with_the_socket(plan: RankPlan) -> None:
    """Whatever the launcher dies of, and on whatever system."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {
        **plan.environ,
        "PYTHONPATH": f"{warm_spares._HOOK}{os.pathsep}{plan.environ['PYTHONPATH']}",
        env.SPARE: str(theirs.fileno()),
    }
    process = subprocess.Popen(plan.command, env=environ, pass_fds=(theirs.fileno(),))
    theirs.close()
    ours.send(spare.LOAD)
    assert ours.recv(16) == spare.READY
    assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "1000\n"  # before a rank, where memory is short
    ours.close()
    assert process.wait(60.0) == 0
    assert not Path(plan.command[-1]).with_name("ran").exists()


def test_priority_is_given_up_only_where_it_can_be_had_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def refused(_kind: int, _who: int, priority: int) -> None:
        if priority <= before:
            raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "setpriority", refused)
        assert not spare._may_return_to(before)
    with spare._in_background():
        inside = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert (inside > before) is (before < spare._BEHIND and spare._may_return_to(before))
