"""The words of Open MPI's `mpirun`, for those who have a line of it: what Hora does anyway is accepted, the rest is answered. Pure.

`mpirun -np 2 -H a:1,b:1 -bind-to none -map-by slot -x NAME=value -mca btl_tcp_if_include eth0 python train.py` becomes
`hora run -np 2 -H a:1,b:1 -bind-to none -map-by slot -x NAME=value -mca btl_tcp_if_include eth0 train.py`, on each host.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hora.errors import ConfigError

_INTERFACE = "btl_tcp_if_include"
_TCP = {"tcp", "self", "sm", "vader"}


@dataclass(frozen=True)
class Hosts:
    """What `-H` says: how many nodes, which of them this machine is, the address of the first, and the slots of each."""

    num_nodes: int
    node_rank: int
    master_addr: str | None
    slots: int

    @property
    def nproc(self) -> int:
        """Slots of all nodes."""
        return self.num_nodes * self.slots


def read_exports(words: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `-x NAME` (as it is here, if it is set: ranks get all variables anyway) and `-x NAME=value`.

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


def check_placement(bind_to: str | None, map_by: str | None) -> None:
    """Accepts how Hora places ranks: bound to no core, node by node.

    Raises:
        ConfigError: another way is asked for.
    """
    problems = []
    if bind_to not in (None, "none"):
        problems.append(
            f"-bind-to {bind_to}: Hora binds no rank to cores; leave it out, or start the script through `taskset` or `numactl`"
        )
    if map_by not in (None, "slot", "node:slot"):
        problems.append(f"-map-by {map_by}: Hora numbers the ranks node by node, as -map-by slot does; leave it out")
    if problems:
        raise ConfigError("; ".join(problems))


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


def read_hosts(text: str, is_here: Callable[[str], bool], nproc: int | None = None) -> Hosts:
    """What `-H host:slots,host:slots` says. Without `:slots` a host has its share of `nproc`, if that is given, else one.

    Args:
        text: the word after `-H`.
        is_here: whether a host is this machine.
        nproc: ranks of the job.

    Raises:
        ConfigError: it cannot be read, this machine is not among the hosts, or they have different numbers of slots.
    """
    hosts: dict[str, int] = {}
    words = text.split(",")
    share = max(1, (nproc or 0) // len(words))
    for word in words:
        host, _, slots = word.rpartition(":") if ":" in word else (word, "", str(share))
        if not host or not slots.isdigit() or int(slots) < 1:
            raise ConfigError(f"-H must read host:slots,host:slots with slots from 1, but has {word!r}")
        hosts[host] = hosts.get(host, 0) + int(slots)
    loopback = [host for host in hosts if host == "localhost" or host.startswith("127.")]
    if loopback and len(loopback) < len(hosts):
        raise ConfigError(f"-H {text}: {loopback[0]} is another machine on each host; give the name by which the others know it")
    here = [host for host in hosts if is_here(host)]
    if len(here) == len(hosts):
        return Hosts(1, 0, None, sum(hosts.values()))
    if len(here) != 1:
        what = "is none of them" if not here else f"is {' and '.join(here)}"
        raise ConfigError(
            f"-H {text}: this machine must be one of the hosts, but {what}; run the same command on each host, under the names it knows"
        )
    if len(set(hosts.values())) > 1:
        raise ConfigError(f"-H {text}: all hosts must have as many slots, for a rank's number tells its node; give the same number to each")
    names = list(hosts)
    return Hosts(len(hosts), names.index(here[0]), names[0], hosts[here[0]])
