"""Hosts on this machine: a program in the place of ssh, and what its end does to the two processes that it connects."""

import sys
from collections.abc import Callable
from pathlib import Path

from launcher_kit import Job

StartOn = Callable[..., Job]

# Like ssh it passes words through a shell, in another session, without the variables of this side; and what it connects ends when it does.
_SSH = """\
#!{python} -S
import os, subprocess, sys, threading

words = sys.argv[1:]
at = words.index("--")
host, line = words[at + 1], " ".join(words[at + 2 :])
assert "BatchMode=yes" in words and "-T" in words and not sys.stdin.isatty()
if host == "refused":
    sys.exit("ssh: connect to host refused port 22: Connection refused")
if os.path.exists(gone := os.environ.get("UNREACHABLE", "")) and host == open(gone).read():
    sys.stderr.write(f"ssh: connect to host {{host}} port 22: No route to host\\n")
    sys.exit(255)
if host == "silent":
    import time
    time.sleep(600)
if host == "chatty":
    line = "echo Welcome; echo 'to the cluster'; " + line
if host == "poor":
    os.rename(os.environ["REMOVED"], os.environ["REMOVED"] + ".removed")
if host == "bare":
    line = line.replace("PYTHONPATH=", "X=").replace(" -u -m ", " -u -S -m ")
pids = open({pids!r}, "a")
child = subprocess.Popen(
    ["/bin/sh", "-c", "exec " + line if host != "chatty" else line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    start_new_session=True, cwd="/", env={{
        "PATH": "/usr/bin:/bin", "HOME": {home!r}, "TMPDIR": {temporary!r}, "ON_HOST": host, "HORA_TEST_JOB": os.environ["HORA_TEST_JOB"],
    }},
)
pids.write(f"{{host}} {{os.getpid()}} {{child.pid}}\\n")
pids.close()


def pump(source, target, then=lambda: None):
    while data := os.read(source, 65536):
        while data:
            data = data[os.write(target, data) :]
    then()


threading.Thread(target=pump, args=(0, child.stdin.fileno(), child.stdin.close), daemon=True).start()
outputs = [threading.Thread(target=pump, args=pair) for pair in ((child.stdout.fileno(), 1), (child.stderr.fileno(), 2))]
for thread in outputs:
    thread.start()
for thread in outputs:
    thread.join()
code = child.wait()
os._exit(code if code >= 0 else 255)
"""


class Hosts:
    """Any name is a host, reached with the words `rsh`: "refused" lets nobody in, "silent" never answers, "bare" lacks Hora, "poor" the path
    REMOVED, "chatty" greets. One that the file UNREACHABLE
    names cannot be reached from then on."""

    def __init__(self, directory: Path) -> None:
        self._pids = directory / "pids"
        home, temporary = directory / "home", directory / "tmp"
        for made in (directory, home, temporary):
            made.mkdir()
        self.home, self.temporary = home, temporary
        self._ssh = directory / "ssh"
        text = _SSH.format(python=sys.executable, pids=str(self._pids), home=str(home), temporary=str(temporary))
        self._ssh.write_text(text, encoding="utf-8")
        self._ssh.chmod(0o755)

    @property
    def rsh(self) -> tuple[str, ...]:
        """Options of `hora run`."""
        return ("--rsh", str(self._ssh), "--interface", "lo")

    def processes(self, host: str) -> tuple[int, int]:
        """The remote shell to a host, and its agent."""
        for line in self._pids.read_text(encoding="utf-8").splitlines():
            name, shell, agent = line.split()
            if name == host:
                return int(shell), int(agent)
        raise AssertionError(f"nobody went to {host}")

    def newest(self, host: str) -> tuple[int, int]:
        """As `processes`, of the last time that somebody went there."""
        lines = [line.split() for line in self._pids.read_text(encoding="utf-8").splitlines()]
        return next((int(shell), int(agent)) for name, shell, agent in reversed(lines) if name == host)

    def left(self) -> list[str]:
        """What agents have left in the hosts' directory for temporary files."""
        return sorted(path.name for path in self.temporary.iterdir())
