"""The command that starts the agent on another host, and what it means when that fails. Pure.

What the user gave (script, arguments, directory, variables) is no part of the command: it follows on standard input. The command holds
this Hora's Python and, where it is set, PYTHONPATH, without which Python would not find Hora.
"""

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from hora.errors import ConfigError

AGENT = "hora.launch.remote_agent"
"""Module of the agent."""

_CONNECT_S = 15

_SSH_OPTIONS = (
    "-T", "-x", "-a",
    "-o", "BatchMode=yes",
    "-o", f"ConnectTimeout={_CONNECT_S}",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
    "-o", "ClearAllForwardings=yes", "-o", "ControlMaster=no", "-o", "LogLevel=ERROR",
)  # fmt: skip


def agent_command(host: str, *, rsh: str | None, python: str | None, environ: Mapping[str, str], module: str = AGENT) -> list[str]:
    """The command line on this machine that starts the agent `module` on `host`: ssh's, or `rsh host command...`.

    A command that is called `ssh` is given the options that keep it from asking, and passes its words through a shell.

    Raises:
        ConfigError: `rsh` is no command.
    """
    words = [python or sys.executable, "-u", "-m", module]
    if environ.get("PYTHONPATH"):
        words = ["env", f"PYTHONPATH={environ['PYTHONPATH']}", *words]
    shell = _read_rsh(rsh)
    if Path(shell[0]).name == "ssh":
        return [*shell, *_SSH_OPTIONS, "--", host, shlex.join(words)]
    return [*shell, host, *words]


def _read_rsh(rsh: str | None) -> list[str]:
    try:
        words = ["ssh"] if rsh is None else shlex.split(rsh)
    except ValueError as error:
        raise ConfigError(f"--rsh must be a command, but {rsh!r} cannot be read: {error}") from error
    if not words:
        raise ConfigError("--rsh must be a command such as `ssh -p 2222`, but is empty")
    return words


# What ssh, a shell or Python says, and what to do about it.
_REMEDIES = (
    (r"Could not resolve hostname|Name or service not known", "its name is not known here: check it, or give an address"),
    (r"Host key verification failed|REMOTE HOST IDENTIFICATION", "connect once by hand (`ssh {host}`) and confirm its key"),
    (r"Permission denied", "let yourself in without a password first: `ssh-copy-id {host}`"),
    (
        r"Connection (refused|timed out|closed|reset)|No route to host|Network is unreachable|Operation timed out",
        "see that it is up and lets ssh in, or name what starts a command there with --rsh",
    ),
    (
        r"No module named",
        "the Python there lacks Hora: install it with all that it needs, or name a Python that has it with --remote-python",
    ),
    (
        r"not found|No such file or directory|cannot execute",
        "{python} is not there: install the same environment, or name its Python with --remote-python",
    ),
    (r"unknown option|SyntaxError|invalid syntax", "{python} there is older than Python 3.11: name another with --remote-python"),
)


def explain_failure(host: str, *, exit_code: int | None, said: str, python: str, waited_s: float) -> str:
    """What is wrong with a host whose agent did not come, and what to do. `said` is what came instead; no exit code: nothing within `waited_s`."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    what = f"{host} did not answer within {waited_s:g} s" if exit_code is None else f"{host} cannot be used (exit code {exit_code}){last}"
    remedies = [remedy for pattern, remedy in _REMEDIES if re.search(pattern, said)]
    default = (
        "see that `ssh {host} true` works without asking anything"
        if exit_code in (None, 255)
        else "try `{python} -m hora run` there by hand"
    )
    return f"{what}; " + (remedies[0] if remedies else default).format(host=host, python=python)
