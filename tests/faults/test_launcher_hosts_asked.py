"""Several hosts are asked before anything starts: what is wrong with one is named, with what to do, and nothing has run anywhere."""

import signal
import sys
from pathlib import Path

import pytest
from hosts_kit import Hosts, StartOn
from launcher_kit import PROMISED_S, Job, kill


def test_ctrl_c_while_hosts_are_asked_leaves_at_once(start_on: StartOn, hosts: Hosts) -> None:
    job = start_on("alpha,silent", "tell('started')\n")
    while not any(process.pid != job.pid for process in job.members()):
        assert job.process.poll() is None
    kill(job.pid, signal.SIGINT)
    assert job.wait(20) == 130


def test_a_launcher_that_is_killed_while_hosts_are_asked_leaves_no_remote_shell(start_on: StartOn) -> None:
    """One that is still connecting does not look at its input, whose end tells an agent."""
    job = start_on("silent", "tell('started')\n")
    job.await_members("BatchMode=yes")
    shells = [process.pid for process in job.members() if process.pid != job.pid]
    assert shells
    kill(job.pid)
    assert job.gone_after(shells) < PROMISED_S


def refused(start_on: StartOn, names: str, *flags: str, **others: str) -> Job:
    job = start_on(names, "tell('started')\n", *flags, **others)
    assert job.wait() != 0
    with pytest.raises(AssertionError, match="in vain"):
        job.expect("started", 1, timeout_s=0.0)
    return job


def test_all_hosts_that_cannot_be_used_are_named_before_anything_starts(start_on: StartOn) -> None:
    job = refused(start_on, "localhost,refused,bare,alpha")
    assert job.process.returncode == 1
    assert "refused cannot be used (exit code 1): ssh: connect to host refused port 22: Connection refused; see that it is up" in job.err
    assert "bare cannot be used" in job.err
    assert "the Python there lacks Hora" in job.err
    assert "alpha" not in job.err


def test_a_host_that_does_not_answer_is_named_at_the_deadline(start_on: StartOn) -> None:
    job = refused(start_on, "silent", "--join-timeout", "0.3")
    assert "silent did not answer within 0.3 s; see that `ssh silent true` works" in job.err


def test_a_python_that_is_not_there_is_named(start_on: StartOn) -> None:
    job = refused(start_on, "alpha", "--remote-python", "/no/such/python")
    assert "/no/such/python is not there" in job.err


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("hora.__version__ = '0.0.9'", "hora is 0.0.9 there but"),
        ("sys.version_info = (3, 99)", "python is 3.99 there but"),
    ],
)
def test_another_version_is_named(start_on: StartOn, tmp_path: Path, what: str, text: str) -> None:
    odd = tmp_path / "odd.py"
    odd.write_text(f"import sys\nimport hora\n{what}\nfrom hora.launch.remote_agent import main\nsys.exit(main())\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {odd}\n")
    python.chmod(0o755)
    job = refused(start_on, "alpha", "--remote-python", str(python))
    assert job.process.returncode == 2
    assert f"alpha: {text}" in job.err
    assert "--remote-python" in job.err


def test_a_directory_that_is_not_there_is_named(start_on: StartOn, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    job = refused(start_on, "poor", "--wdir", str(place), REMOVED=str(place))
    assert job.process.returncode == 2
    assert f"poor: the directory {place} must be there too, but: No such file or directory; " in job.err
    assert "--wdir" in job.err


def test_a_script_that_is_not_there_is_named(start_on: StartOn, tmp_path: Path) -> None:
    job = refused(start_on, "localhost,poor", REMOVED=str(tmp_path / "job0.py"))
    assert job.process.returncode == 2
    assert f"poor: there is no script '{tmp_path / 'job0.py'}'" in job.err


@pytest.mark.parametrize("name", ["-oProxyCommand=touch${IFS}x", "a;b", "a b"])
def test_hostile_names_start_nothing(start_on: StartOn, hosts: Hosts, name: str) -> None:
    job = refused(start_on, name)
    assert job.process.returncode == 2
    assert "a host must" in job.err
    assert not (hosts.temporary.parent / "pids").exists()
