"""`hora doctor` over several hosts: a stand-in for ssh whose hosts lack this and that, and hosts that share nothing but a wire."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from hosts_kit import Hosts
from networks_kit import Network, needs_networks

Findings = dict[tuple[str | None, str], dict[str, Any]]


def command(tmp_path: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    environ = {**os.environ, "HORA_TEST_JOB": str(tmp_path), "HORA_STATE_DIR": str(tmp_path / "state")}
    return [sys.executable, "-m", "hora", "doctor", *words], environ


def examine(tmp_path: Path, *words: str) -> tuple[int, Findings]:
    line, environ = command(tmp_path, *words, "--json", "-")
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=100)
    assert done.stdout, done.stderr
    return done.returncode, {(finding["host"], finding["name"]): finding for finding in json.loads(done.stdout)}


# An agent of another version, on a host whose clock is a day ahead, and which lacks a part of Hora's code.
ODD = """\
import sys, time
import hora
from hora.diag.doctor import agent, code
hora.__version__ = "0.0.9"
code.digest_of_hora = lambda: "1 files, 0"
now = time.time
agent.time.time = lambda: now() + 86400
sys.exit(agent.main())
"""


def test_what_is_wrong_with_hosts_and_between_them_is_said(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'odd.py'}\n")
    python.chmod(0o755)
    code, found = examine(
        tmp_path, "-H", "localhost:2,beta:2,refused", *hosts.rsh, "--remote-python", str(python), "--shared-dir", str(tmp_path)
    )
    assert code == 1
    grades = {name: finding["grade"] for (host, name), finding in found.items() if host is None}
    assert grades == {
        "is reached": "wrong", "hora": "wrong", "python": "ok", "torch": "ok", "system": "ok", "code of Hora": "wrong",
        "code in this directory": "ok", "names": "warning", "clocks": "warning", "ways between hosts": "ok", "bandwidth": "ok",
        "directory is shared": "ok",
    }  # fmt: skip
    assert found[None, "is reached"]["found"].startswith("refused cannot be used (exit code 1): ssh: connect to host refused port 22")
    assert found[None, "hora"]["found"].endswith("; 0.0.9 on beta")
    assert found[None, "clocks"]["found"] == "beta is 86400.0 s ahead of localhost"
    assert "localhost does not know refused" in found[None, "names"]["found"]
    for host in ("localhost", "beta"):
        assert {name for at, name in found if at == host} >= {"hora", "cores", "memory", "open to the network", "shared directory"}
    assert found["localhost", "hora"]["grade"] == "ok"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".hora-doctor")]


# Mounts of a command of `ip netns exec` are its own: the second host has another file system where the first has DIRECTORY.
APART = """\
#!/bin/sh
host=$1
shift
exec ip netns exec $host sh -c 'test $0 = {lonely} && mount -t tmpfs apart {directory}; exec "$@"' $host "$@"
"""


@needs_networks
def test_a_directory_that_is_not_shared_and_a_slow_wire_are_found(network: Network, tmp_path: Path) -> None:
    directory, rsh = tmp_path / "shared", tmp_path / "rsh"
    directory.mkdir()
    rsh.write_text(APART.format(lonely=network.v4[1], directory=directory))
    rsh.chmod(0o755)
    subprocess.run(
        ["tc", "-n", network.v4[0], "qdisc", "add", "dev", "wire0", "root", "tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms"],
        check=True, timeout=20,
    )  # fmt: skip
    try:
        code, found = examine(tmp_path, "-H", ",".join(network.v4), "--rsh", str(rsh), "--shared-dir", str(directory))
    finally:
        subprocess.run(["tc", "-n", network.v4[0], "qdisc", "del", "dev", "wire0", "root"], check=True, timeout=20)
    assert code == 1
    first, second = network.v4
    assert found[None, "directory is shared"]["grade"] == "wrong"
    assert f"{first} does not see what {second} wrote" in found[None, "directory is shared"]["found"]
    assert found[None, "bandwidth"]["grade"] == "warning"
    assert f"but from {first} to {second}" in found[None, "bandwidth"]["found"]
    assert found[None, "ways between hosts"]["grade"] == "ok"
    assert f"{first} at {first}, {second} at {second}, this machine at" in found[None, "ways between hosts"]["found"]


def test_agents_of_a_doctor_that_is_killed_go(hosts: Hosts, tmp_path: Path) -> None:
    line, environ = command(tmp_path, "-H", "alpha,silent", *hosts.rsh)
    doctor = subprocess.Popen(line, env=environ, stdout=subprocess.DEVNULL)
    pids = Path(hosts.temporary.parent / "pids")
    while not pids.exists() or "alpha" not in pids.read_text():
        assert doctor.poll() is None
        time.sleep(0.01)
    doctor.kill()
    doctor.wait()
    agent = psutil.Process(hosts.processes("alpha")[1])
    agent.wait(30)
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("HORA_TEST_JOB") == str(tmp_path):  # the shell to the silent host
            process.kill()
