"""Names, interfaces, and what listens to the network."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from hora.comm.interfaces import interface_of
from hora.diag.doctor.finding import Finding, ok, warning, wrong
from hora.launch.nodes import DEFAULT_PORT

_FEW_PORTS = 1024
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def names() -> Iterator[Finding]:
    """What this host's name stands for: other hosts are told it, or an address."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)})
    except OSError as error:
        yield warning("host name", f"{name} cannot be resolved ({error.strerror})", f"add a line for {name} to /etc/hosts with its address")
        return
    found = f"{name} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses):
        yield warning(
            "host name",
            f"{found}: loopback alone",
            "fine for one host; for several, have /etc/hosts or DNS give its address in the network, or name the first host by address",
        )
    else:
        yield ok("host name", found)


def interfaces() -> Iterator[Finding]:
    """Those that are up, and those that variables ask for."""
    loopback = interface_of("127.0.0.1")
    if loopback is None:
        yield wrong("loopback", "no interface has 127.0.0.1", "ip link set lo up: ranks of one host meet there")
    stats, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    up = [
        f"{name} {entry.address}"
        for name, entries in addresses.items()
        for entry in entries
        if entry.family is socket.AF_INET and name in stats and stats[name].isup
    ]
    yield ok("interfaces", ", ".join(up) or "none is up")
    for variable in _INTERFACE_VARIABLES:
        wanted = os.environ.get(variable)
        named = [part.lstrip("=") for part in (wanted or "").split(",") if part and not part.startswith("^")]
        if named and not any(there.startswith(part) for part in named for there in addresses):
            yield wrong(variable, f"{wanted}, but there are {', '.join(addresses)}", f"unset {variable}, or name one of these")


def ports(root: Path = Path("/")) -> Iterator[Finding]:
    """Whether node 0 could listen where it does unless told otherwise, and how many ports there are for all else."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", DEFAULT_PORT))
        except OSError as error:
            yield warning(
                "ports",
                f"{DEFAULT_PORT}, where launchers of several nodes meet that are started by hand, cannot be had: {error.strerror}",
                "give them another with --master-port; -H, and jobs of one node, take a free one",
            )
            return
    try:
        first, last = map(int, (root / "proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    except OSError:  # not on this system
        yield ok("ports", f"{DEFAULT_PORT} is free")
        return
    found = f"{DEFAULT_PORT} is free, and {first} to {last} are handed out"
    few = last - first + 1 < _FEW_PORTS
    yield warning("ports", found, "sysctl net.ipv4.ip_local_port_range='32768 60999'") if few else ok("ports", found)


def listeners() -> Iterator[Finding]:
    """Programs of Python's that strangers can reach: the stores of torchrun and of torch.distributed execute what they are sent."""
    open_ones = []
    for process in psutil.process_iter(["name", "pid"]):
        if not (process.info["name"] or "").startswith(("python", "torchrun", "hora", "pt_")):
            continue
        try:
            connections = process.net_connections("tcp")
        except (psutil.Error, OSError):
            continue
        open_ones += [
            f"{process.info['name']} ({process.info['pid']}) on {connection.laddr.ip}:{connection.laddr.port}"
            for connection in connections
            if connection.status == psutil.CONN_LISTEN and not ipaddress.ip_address(connection.laddr.ip.split("%")[0]).is_loopback
        ]
    if open_ones:
        yield warning(
            "open to the network",
            "; ".join(sorted(open_ones)[:5]),
            "if one is a store of torchrun or torch.distributed, whoever reaches it can run programs as its user: close the port to others, or "
            "start the job with hora run",
        )
    else:
        yield ok("open to the network", "no program of Python's listens outside loopback")
