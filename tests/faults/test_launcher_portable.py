"""With what only Linux has switched off, a job of one node still works, and still dies with its launcher."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_kit import PROMISED_S, Start, kill

PORTABLE = {"HORA_PORTABLE": "1"}

# Runs the launcher under an audit hook that notes in a file each use of what only Linux has.
AUDITED = """\
import os, runpy, sys

notes = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(event, arguments):
    if event in ("open", "os.listdir") and str(arguments[0]).startswith("/proc"):
        os.write(notes, b"proc\\n")
    elif event in ("socket.bind", "socket.connect") and isinstance(arguments[1], str):
        os.write(notes, b"unix\\n")
    elif event == "ctypes.dlsym" and arguments[1] == "prctl":
        os.write(notes, b"prctl\\n")


sys.addaudithook(note)
del sys.argv[:2]
sys.argv.insert(0, "launch")
runpy.run_module("hora.launch", run_name="__main__")
"""


@pytest.mark.parametrize(("portable", "used"), [("1", set()), ("0", {"proc", "unix", "prctl"})])
def test_the_portable_way_uses_nothing_that_only_linux_has(tmp_path: Path, portable: str, used: set[str]) -> None:
    (tmp_path / "audited.py").write_text(AUDITED)
    (tmp_path / "script.py").write_text("pass\n")
    command = [sys.executable, str(tmp_path / "audited.py"), str(tmp_path / "notes"), "-np", "2", str(tmp_path / "script.py")]
    environ = os.environ | {"HORA_PORTABLE": portable, "HORA_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}
    subprocess.run(command, env=environ, check=True, timeout=60)
    assert set((tmp_path / "notes").read_text().split()) == used


def test_ranks_meet_on_loopback(start: Start) -> None:
    body = (
        "from hora.rendezvous.client import Client\nfrom hora.rendezvous.key import read_key\n"
        "assert os.environ['HORA_RENDEZVOUS'].startswith('tcp://127.0.0.1:'), os.environ['HORA_RENDEZVOUS']\n"
        "client = Client(os.environ['HORA_RENDEZVOUS'], read_key(os.environ['HORA_KEY_FILE']), name='rank', timeout_s=30)\n"
        "client.set(f'from/{RANK}', b'')\nclient.wait([f'from/{1 - RANK}'])\nclient.close()\n"
    )
    job = start(body, **PORTABLE)
    assert job.wait() == 0, job.err
    assert job.left_in_temporary() == []


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_outlives_a_killed_launcher(start: Start, stopped: bool) -> None:
    job = start("tell('ready', os.getpid(), grandchild())\nwait_forever()\n", **PORTABLE)
    pids = [pid for told in job.expect("ready", 2).values() for pid in told] + [job.guardian().pid]
    if stopped:
        kill(pids[0], signal.SIGSTOP)
    kill(job.pid)
    assert job.gone_after(pids) < PROMISED_S
    assert job.left_in_temporary() == []


def test_a_failed_rank_ends_the_job(start: Start) -> None:
    job = start("tell('ready', os.getpid())\nwait_forever()\n", ranks=3, **PORTABLE)
    pids = {rank: pid for rank, (pid,) in job.expect("ready", 3).items()}
    kill(pids[2])
    assert job.gone_after(pids.values()) < PROMISED_S
    assert job.wait() == 128 + signal.SIGKILL
    assert "rank 2 failed" in job.err


def test_a_new_guardian_knows_what_the_old_one_guarded(start: Start) -> None:
    """Without /proc it has to be told: there is no looking for what the ranks have started."""
    job = start("tell('ready', os.getpid(), grandchild())\nwait_forever()\n", **PORTABLE)
    pids = [pid for told in job.expect("ready", 2).values() for pid in told]
    old = job.guardian().pid
    kill(old)
    renewed = job.guardian_after(old)
    kill(job.pid)
    assert job.gone_after([*pids, renewed]) < PROMISED_S
