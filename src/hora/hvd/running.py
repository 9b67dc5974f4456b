"""`horovod.run`: calls a function on several ranks and returns what it returned on each; `hora.run` with Horovod's words."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.calls.call import run_with
from hora.errors import ConfigError
from hora.launch.horovod_words import STANDIN
from hora.launch.hosts import read_hostfile, read_hosts
from hora.launch.ports import is_this_machine

_ELASTIC = ("min_num_proc", "min_np", "max_num_proc", "max_np", "slots", "reset_limit", "cooldown_range", "host_discovery_script")
_FLAGS = {
    "start_timeout": "--start-timeout",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "disable_cache": "--disable-cache",
    "output_filename": "--output-filename",
    "verbose": "--verbose",
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
    "mpi_args": "--mpi-args",
    "network_interface": "--network-interfaces",
    "network_interfaces": "--network-interfaces",
}
"""What an argument of Horovod's is to `hora run --horovod`."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    executable: str | None = None,
    **others: Any,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` on each of `num_proc` new ranks of this machine, and returns the results by rank.

    The function must stand at the top of a module that the ranks can import: nothing is pickled. See `hora.run`.

    Args:
        func: calls `hvd.init()`, if it wants the ranks to talk to each other.
        args: what it is given, the same on each rank.
        kwargs: by name.
        num_proc: how many.
        np: the same as `num_proc`.
        hosts: this machine, such as `localhost:4`; others cannot be named.
        hostfile: the same as a file.
        executable: this Python.
        **others: as in Horovod, what the options of `horarun` with these names ask for.

    Raises:
        ConfigError: the function or something in its arguments cannot travel, or an argument asks for what is not there; nothing has been started.
        RankFailed: it raised an exception on a rank, or a rank died.
    """
    if unknown := set(others) - set(_ELASTIC) - set(_FLAGS):
        raise TypeError(f"horovod.run has no argument {', '.join(sorted(unknown))}")
    given = {name: value for name, value in others.items() if value not in (None, False)}
    num_ranks = num_proc if np is None else np
    problems = [
        f"{name}: ranks of a function are not started anew, nor others added; give a script to `horarun`"
        for name in _ELASTIC
        if name in given
    ]
    if executable is not None and Path(executable).resolve() != Path(sys.executable).resolve():
        problems.append(f"executable: ranks run the Python of this process, {sys.executable}, and not {executable}; leave it out")
    problems += _look_for_slots(hosts, hostfile, num_ranks)
    if problems:
        raise ConfigError("; ".join(problems))
    words = [_word(_FLAGS[name], value) for name, value in given.items()]
    return run_with(["--horovod", *words], func, args, kwargs, num_ranks=num_ranks, path=[str(STANDIN)])


def _look_for_slots(hosts: str | None, hostfile: str | None, num_ranks: int) -> list[str]:
    """What is wrong with the hosts: results come back through files of this machine, so all ranks must be here."""
    if hosts is not None and hostfile is not None:
        return ["hosts and hostfile contradict each other; give one of them"]
    named = read_hosts(hosts) if hosts is not None else read_hostfile(Path(hostfile)) if hostfile is not None else ()
    away = [host.name for host in named if not is_this_machine(host.address)]
    slots = sum(host.slots or num_ranks for host in named)
    if away:
        return [f"a function is called on ranks of this machine, and {', '.join(away)} is another; give a script to `horarun -H`"]
    return (
        [f"{num_ranks} ranks need as many slots, but the hosts have {slots}; give them more (host:N)"]
        if named and slots < num_ranks
        else []
    )


def _word(flag: str, value: Any) -> str:
    if flag == "--verbose" or value is True:
        return flag
    return f"{flag}={value if isinstance(value, str | int) else ','.join(value)}"
