"""Signals to the launcher: passed on, waited for, and in the end obeyed."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_kit import PROMISED_S, Start, inherited_signals, kill

WAITING = "tell('ready', os.getpid())\nwait_forever()\n"
# A rank that saves when it is asked to end, once the test says so through a file.
SAVING = """\
def save(*_):
    tell('asked')
    while not os.path.exists(os.environ['GO']):
        time.sleep(0.01)
    tell('saved')
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
tell('ready', os.getpid())
wait_forever()
"""
STUBBORN = "for name in ('SIGINT', 'SIGTERM'):\n    signal.signal(getattr(signal, name), lambda *_: tell('asked'))\n" + WAITING


def test_ctrl_c_ends_the_job_with_130(start: Start) -> None:
    job = start(WAITING)
    pids = [pid for (pid,) in job.expect("ready", 2).values()]
    kill(job.pid, signal.SIGINT)
    assert job.gone_after(pids) < PROMISED_S
    assert job.wait() == 130
    assert "KeyboardInterrupt" in job.err
    assert "failed" not in job.err


def test_ctrl_c_waits_for_ranks_that_save(start: Start, tmp_path: Path) -> None:
    job = start(SAVING, GO=str(tmp_path / "go"))
    job.expect("ready", 2)
    kill(job.pid, signal.SIGINT)
    job.expect("asked", 2)
    assert job.process.poll() is None
    (tmp_path / "go").touch()
    job.expect("saved", 2)
    assert job.wait() == 130


def test_a_second_ctrl_c_kills(start: Start) -> None:
    job = start(STUBBORN)
    pids = [pid for (pid,) in job.expect("ready", 2).values()]
    kill(job.pid, signal.SIGINT)
    job.expect("asked", 2)
    kill(job.pid, signal.SIGINT)
    assert job.gone_after(pids) < PROMISED_S
    assert job.wait() == 130


def test_a_second_sigterm_does_not_spoil_a_save(start: Start, tmp_path: Path) -> None:
    job = start(SAVING.replace("tell('asked')", "signal.signal(signal.SIGTERM, signal.SIG_IGN); tell('asked')"), GO=str(tmp_path / "go"))
    job.expect("ready", 2)
    kill(job.pid, signal.SIGTERM)
    job.expect("asked", 2)
    kill(job.pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    job.expect("saved", 2)
    assert job.wait() == 75


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_lets_ranks_save_and_ends_with_75(start: Start, tmp_path: Path, signum: signal.Signals) -> None:
    job = start(SAVING, GO=str(tmp_path / "go"))
    job.expect("ready", 2)
    kill(job.pid, signum)
    job.expect("asked", 2)
    (tmp_path / "go").touch()
    job.expect("saved", 2)
    assert job.wait() == 75
    assert "after a save" in job.err


def test_sigterm_without_a_save_ends_with_143(start: Start) -> None:
    job = start(WAITING)
    pids = [pid for (pid,) in job.expect("ready", 2).values()]
    kill(job.pid, signal.SIGTERM)
    assert job.gone_after(pids) < PROMISED_S
    assert job.wait() == 143
    assert "no rank said" in job.err


def test_ranks_that_do_not_end_are_killed_after_the_grace(start: Start) -> None:
    job = start(STUBBORN, "--grace", "0.3")
    pids = [pid for (pid,) in job.expect("ready", 2).values()]
    begin = time.monotonic()
    kill(job.pid, signal.SIGTERM)
    job.expect("asked", 2)
    job.gone_after(pids)
    assert 0.3 <= time.monotonic() - begin < 0.3 + PROMISED_S
    assert job.wait() == 143


def test_a_rank_that_saved_by_itself_gives_the_others_time_to_do_so(start: Start, tmp_path: Path) -> None:
    body = (
        "if RANK == 0:\n    tell('saved')\n    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile not os.path.exists(os.environ['GO']):\n    time.sleep(0.01)\nsys.exit(75)\n"
    )
    job = start(body, GO=str(tmp_path / "go"))
    job.expect("saved", 1)
    # Longer than a failure would leave rank 1.
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(1.0)
    (tmp_path / "go").touch()
    assert job.wait() == 75
    assert "rank 0 ended before its time after a save" in job.err


def test_a_rank_that_goes_on_after_a_save_is_ended_after_the_grace(start: Start, tmp_path: Path) -> None:
    body = "if RANK == 0:\n    while not os.path.exists(os.environ['GO']):\n        time.sleep(0.01)\n    sys.exit(75)\n"
    job = start(body + STUBBORN, "--grace", "0.3", GO=str(tmp_path / "go"))
    (pid,) = job.expect("ready", 1)[1]
    (tmp_path / "go").touch()
    job.expect("asked", 1)
    job.gone_after([pid])
    assert job.wait() == 75


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_reach_every_rank(start: Start, signum: signal.Signals) -> None:
    job = start(f"signal.signal({signum}, lambda *_: (tell('heard'), sys.exit(0)))\ntell('ready')\nwait_forever()\n")
    job.expect("ready", 2)
    kill(job.pid, signum)
    job.expect("heard", 2)
    assert job.wait() == 0


def test_a_signal_goes_to_the_rank_and_not_to_its_children(start: Start) -> None:
    """A data loader's worker that dies of the SIGTERM would take the save down with it."""
    child = (
        "import os, signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(1))\nprint(flush=True)\nsignal.sigwait([signal.SIGUSR1])"
    )
    body = (
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\nchild.stdout.readline()\n"
        "def save(*_):\n    child.send_signal(signal.SIGUSR1)\n    sys.exit(75 if child.wait() == 0 else 3)\n"
        "signal.signal(signal.SIGTERM, save)\ntell('ready')\nwait_forever()\n"
    )
    job = start(body)
    job.expect("ready", 2)
    kill(job.pid, signal.SIGTERM)
    assert job.wait() == 75


def test_what_was_ignored_at_the_start_stays_ignored(start: Start, tmp_path: Path) -> None:
    """As under nohup: a terminal that hangs up does not end the job."""
    job = start(SAVING.replace("SIGINT", "SIGUSR1"), GO=str(tmp_path / "go"), ignored=[signal.SIGHUP])
    job.expect("ready", 2)
    kill(job.pid, signal.SIGHUP)
    kill(job.pid, signal.SIGUSR1)
    job.expect("asked", 2)
    (tmp_path / "go").touch()
    job.expect("saved", 2)
    assert job.wait() == 75
    assert "SIGTERM" not in job.err


def test_a_terminals_ctrl_c_reaches_the_launcher_alone(tmp_path: Path) -> None:
    """The terminal interrupts its whole foreground group; the rank must hear of it once, from the launcher."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\nheard = []\nsignal.signal(signal.SIGINT, lambda *_: heard.append(1))\nprint('ready', flush=True)\n"
        "while not heard:\n    time.sleep(0.01)\n"
        "print('heard', len(heard), os.getsid(0) == os.getpid(), os.isatty(1), flush=True)\n"
    )
    controller, terminal = pty.openpty()
    take_terminal = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
    with inherited_signals():
        process = subprocess.Popen(
            [sys.executable, "-c", take_terminal, sys.executable, "-m", "hora.launch", "-np", "1", str(script)],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env=os.environ | {"HORA_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(tmp_path)},
        )  # fmt: skip
    os.close(terminal)
    try:
        read_until(controller, b"ready")
        os.write(controller, b"\x03")
        assert b"heard 1 True True" in read_until(controller, b"ended by Ctrl-C\r\n")
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def read_until(descriptor: int, end: bytes) -> bytes:
    data = b""
    while end not in data:
        assert select.select([descriptor], [], [], 30)[0], f"waited in vain for {end!r} after {data!r}"
        data += os.read(descriptor, 4096)
    return data
