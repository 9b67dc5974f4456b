"""What shows only between hosts: what they have told, compared. Pure."""

import ipaddress
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hora.diag.doctor.finding import Finding, Grade, ok, warning, wrong

_MAX_SKEW_S = 1.0
_SLOW_BYTES_PER_S = 100e6
_STRAGGLER = 0.5
_GIGABIT = 125e6


@dataclass(frozen=True)
class Clock:
    """How far a host's clock is ahead of this one's, and how wrong that may be."""

    ahead_s: float
    doubt_s: float


@dataclass(frozen=True)
class Transfer:
    """What went from one host to another."""

    source: str
    target: str
    bytes_per_s: float


def same(name: str, told: Mapping[str, str], remedy: str, grade: Grade = "wrong") -> Finding:
    """Whether all hosts have told the same."""
    hosts_of: dict[str, list[str]] = {}
    for host, value in told.items():
        hosts_of.setdefault(value, []).append(host)
    if len(hosts_of) == 1:
        return ok(name, f"{next(iter(hosts_of))} everywhere")
    return Finding(name, grade, "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in hosts_of.items()), remedy)


def clocks(told: Mapping[str, Clock]) -> Finding:
    """Whether they tell the same time, as far as that can be known from here."""
    first, last = (pick(told, key=lambda host: told[host].ahead_s) for pick in (min, max))
    apart_s = told[last].ahead_s - told[first].ahead_s
    doubt_s = told[last].doubt_s + told[first].doubt_s
    if apart_s - doubt_s <= _MAX_SKEW_S:
        return ok("clocks", f"at most {apart_s + doubt_s:.2f} s apart")
    return warning(
        "clocks",
        f"{last} is {apart_s:.1f} s ahead of {first}",
        "let them be set from one source (chrony, ntp): no deadline of Hora's depends on it, but logs and the ages of files do",
    )


def names(told: Mapping[str, Mapping[str, Sequence[str]]]) -> Finding:
    """Whether each host knows the others by their names, as something that leads to them. `told`: addresses by name, by host."""
    problems = []
    for host, known in told.items():
        for name, addresses in known.items():
            if name == host:
                continue
            if not addresses:
                problems.append(f"{host} does not know {name}")
            elif all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses):
                problems.append(f"on {host} {name} is {', '.join(addresses)}, which leads back to {host}")
    if not problems:
        return ok("names", "each host knows the others")
    return warning(
        "names",
        "; ".join(problems),
        "hora run -H passes addresses on and does not mind; for other launchers mend /etc/hosts (no 127.0.1.1) or DNS, or give addresses",
    )


def reach(told: Mapping[str, Mapping[str, str | None]], addresses: Mapping[str, str]) -> Finding:
    """Whether each host reaches the others at their addresses; `told`: why not, by the other, by host."""
    problems = [
        f"{host} does not reach {other} at {addresses[other]}: {problem}"
        for host, others in told.items()
        for other, problem in others.items()
        if problem is not None
    ]
    if not problems:
        return ok("ways between hosts", "each reaches each: " + ", ".join(f"{host} at {address}" for host, address in addresses.items()))
    return wrong(
        "ways between hosts",
        "; ".join(problems),
        "open the ports between the hosts (firewall), or name the network that all are on with --interface",
    )


def speeds(measured: Sequence[Transfer]) -> Finding:
    """Whether the network is as fast everywhere, and fast at all."""
    typical = statistics.median(transfer.bytes_per_s for transfer in measured)
    slowest = min(measured, key=lambda transfer: transfer.bytes_per_s)
    found = f"{_say(typical)} from one host to another"
    where = f"from {slowest.source} to {slowest.target} {_say(slowest.bytes_per_s)}"
    if slowest.bytes_per_s < _STRAGGLER * typical:
        return warning(
            "bandwidth", f"{found}, but {where}", "look at that host's cable, port and interface: all ranks wait for the slowest"
        )
    if typical < _SLOW_BYTES_PER_S:
        return warning("bandwidth", found, "name a faster network with --interface, if there is one: gradients go over it in every step")
    return ok("bandwidth", f"{found}; the least {where}" if len(measured) > 1 else found)


def _say(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s ({bytes_per_s / _GIGABIT:.2g} Gbit/s)"


def marks(directory: str, left: Mapping[str, str], told: Mapping[str, Mapping[str, str]]) -> Finding:
    """Whether a directory is one and the same on all hosts. `left`: what each host has written; `told`: what each has read, by who wrote it."""
    problems = [
        f"{host} does not see what {other} wrote" for host, read in told.items() for other in left if read.get(other) != left[other]
    ]
    if not problems:
        return ok("directory is shared", f"each host reads in {directory} what the others write")
    return wrong(
        "directory is shared",
        f"{directory}: {'; '.join(problems)}",
        "mount the same file system there on all hosts, or name another directory",
    )
