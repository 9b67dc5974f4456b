"""Network interfaces and the addresses on them. Nothing is sent."""

import socket
from contextlib import suppress

import psutil


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`, or None."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def address_of(interface: str) -> str | None:
    """The address of an interface: its first of IPv4, else its first of IPv6 that is good beyond one link; None if it has none."""
    entries = psutil.net_if_addrs().get(interface, [])
    ours = [entry.address for entry in entries if entry.family == socket.AF_INET]
    ours += [entry.address for entry in entries if entry.family == socket.AF_INET6 and not entry.address.startswith("fe80")]
    return next(iter(ours), None)


def address_towards(host: str) -> str:
    """This node's own address on the way to `host`: a datagram socket that is connected, but sends nothing, knows it.

    Raises:
        OSError: the name is not known, or no way leads there.
    """
    problem: OSError | None = None
    for family, _, _, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem or OSError(f"no address of {host}")


def route_to(host: str) -> str | None:
    """As `address_towards`; None where it cannot be told."""
    with suppress(OSError, UnicodeError):
        return address_towards(host)
    return None


def interface_towards(host: str) -> str | None:
    """The name of the interface on the way to `host`, which may be this one; None where it cannot be told, or if `host` stands for all of them."""
    address = None if host in ("0.0.0.0", "::") else route_to(host)
    return None if address is None else interface_of(address)
