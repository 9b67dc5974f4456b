"""What the launcher sees of processes: the kernel's word, and who looks at them with a debugger."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hora.launch.lookout import Lookout, is_frozen
from hora.launch.watch import Sight


class OneRank:
    """In the place of the launcher's ranks."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def alive(self) -> list[int]:
        return [0]

    def pid(self, rank: int) -> int:
        return self._pid


def lookout(directory: Path, pid: int) -> Lookout:
    ranks: Any = OneRank(pid)
    return Lookout(ranks, directory)


def test_a_stopped_process_is_told_from_a_busy_one_by_the_kernel(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            looking = lookout(tmp_path, process.pid)
            assert looking.look() == [Sight(0, process.pid, "R", None)]
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert looking.look() == [Sight(0, process.pid, "T", None)]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "frozen"),
    [
        ("5:freezer:/job\n1:memory:/job\n0::/\n", "freezer/job/freezer.state", "FROZEN\n", True),
        ("5:freezer:/job\n0::/\n", "freezer/job/freezer.state", "THAWED\n", False),
        ("0::/a/job\n", "a/job/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/a/job\n", "a/job/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("4:memory:/job\n", "job/cgroup.events", "frozen 1\n", False),
        ("", "job/cgroup.events", "frozen 1\n", False),
    ],
)
def test_frozen_processes_are_told_by_both_kinds_of_groups(tmp_path: Path, cgroup: str, file: str, text: str, frozen: bool) -> None:
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert is_frozen(cgroup, tmp_path) is frozen


def test_a_process_that_is_gone_is_in_no_known_state(tmp_path: Path) -> None:
    assert lookout(tmp_path, 2**22 + 1).look() == [Sight(0, 2**22 + 1, "?", None)]


def test_a_rank_that_tells_no_stacks_has_none(tmp_path: Path) -> None:
    assert lookout(tmp_path, os.getpid()).stacks([Sight(0, os.getpid(), "R", None)]) == {}


@pytest.mark.parametrize(
    ("file", "debugged"),
    [
        ("/usr/lib/python3.11/pdb.py", True),
        ("/usr/lib/python3.11/bdb.py", True),
        ("/v/site-packages/debugpy/server/api.py", True),
        ("/data/pdb/train.py", False),
        ("/home/me/mypdb.py", False),
    ],
)
def test_python_debuggers_are_known_by_their_files(tmp_path: Path, file: str, debugged: bool) -> None:
    stacks = f'Current thread 0x1 (most recent call first):\n  File "{file}", line 3 in go\n'
    assert lookout(tmp_path, os.getpid()).is_debugged(Sight(0, os.getpid(), "S", None), stacks) is debugged
