"""A launcher in a process of its own."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hora.launch.started import launcher

WAITING = """\
import os, sys, time
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
PARENT = """\
import sys
from hora.launch.started import launcher
with launcher(sys.argv[1:], grace_s=5.0) as process:
    process.wait()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words that start a rank which says its process and waits."""
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "script.py").write_text(WAITING)
    return [str(tmp_path / "script.py"), str(tmp_path / "pid")]


def rank(tmp_path: Path) -> psutil.Process:
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    return psutil.Process(int((tmp_path / "pid").read_text()))


def test_a_launcher_and_its_ranks_end_with_the_block(tmp_path: Path, script: list[str]) -> None:
    with launcher(script, grace_s=5.0) as process:
        started = rank(tmp_path)
    assert process.returncode == 143
    assert not started.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal on a parent's death")
def test_a_launcher_and_its_ranks_end_with_the_process_that_started_it(tmp_path: Path, script: list[str]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *script], stderr=subprocess.DEVNULL)
    started = rank(tmp_path)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 20
    while started.is_running() and started.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.005)
