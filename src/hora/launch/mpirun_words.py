"""The words of Open MPI's `mpirun`, for those who have a line of it: what Hora does anyway is accepted, the rest is answered. Pure.

`mpirun -np 2 -H a:1,b:1 -bind-to none -map-by slot -x NAME=value -mca btl_tcp_if_include eth0 python train.py` becomes
`hora run -np 2 -H a:1,b:1 -bind-to none -map-by slot -x NAME=value -mca btl_tcp_if_include eth0 train.py`. `hosts` reads -H.
"""

from collections.abc import Iterable, Mapping
from typing import cast

from hora.errors import ConfigError
from hora.launch.options import Binding

_INTERFACE = "btl_tcp_if_include"
_TCP = {"tcp", "self", "sm", "vader"}


def read_exports(words: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `-x NAME` (as it is here, if it is set: ranks of this machine get all variables anyway) and `-x NAME=value`.

    Raises:
        ConfigError: a word is neither.
    """
    exports = {}
    for word in words:
        name, given, value = word.partition("=")
        if not name.isidentifier():
            raise ConfigError(f"-x must be followed by NAME or NAME=value, but by {word!r}; give one variable to each -x")
        if given:
            exports[name] = value
        elif name in environ:
            exports[name] = environ[name]
    return exports


def read_placement(bind_to: str | None, map_by: str | None) -> Binding:
    """To what ranks are bound. They are placed node by node, as `-map-by slot` has it.

    Raises:
        ConfigError: another way is asked for.
    """
    problems = []
    if bind_to not in (None, "none", "core", "numa"):
        problems.append(
            f"--bind-to {bind_to}: Hora binds ranks to none, core or numa; give one of these, or start the script through `taskset`"
        )
    if map_by not in (None, "slot", "node:slot"):
        problems.append(f"-map-by {map_by}: Hora numbers the ranks node by node, as -map-by slot does; leave it out")
    if problems:
        raise ConfigError("; ".join(problems))
    return cast("Binding", bind_to or "none")


def read_mca(pairs: Iterable[tuple[str, str]]) -> str | None:
    """The network interface that `-mca` names, if it does.

    Raises:
        ConfigError: what it asks for is not Hora's to give.
    """
    interface, problems = None, []
    for name, value in pairs:
        if name == _INTERFACE and "," not in value and "/" not in value:
            interface = value
        elif name == _INTERFACE:
            problems.append(f"-mca {name} {value}: name one interface, as `ip address` lists them")
        elif name == "btl_tcp_if_exclude":
            problems.append(f"-mca {name} {value}: name the interface to use instead, with --interface")
        elif not ((name == "pml" and value == "ob1") or (name == "btl" and set(value.split(",")) <= _TCP)):
            problems.append(
                f"-mca {name} {value}: this sets up Open MPI, which `hora run` does not use; leave it out, or start with Open MPI's own mpirun, "
                "where OMPI_MCA_* variables say the same"
            )
    if problems:
        raise ConfigError("; ".join(problems))
    return interface


def interface_variables(interface: str) -> dict[str, str]:
    """What keeps the sockets of the ranks on a network interface."""
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "FI_TCP_IFACE": interface,
        "UCX_NET_DEVICES": interface,
    }
