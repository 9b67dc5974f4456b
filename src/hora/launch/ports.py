"""A port for scripts that use torch.distributed themselves, kept from everybody else for the job's life.

On Linux a socket that is bound but does not listen, with SO_REUSEADDR, keeps the system from giving its port to anybody who asks for a free
one, yet lets the store of rank 0 (which sets SO_REUSEADDR too) listen there. Elsewhere the port is only found, not kept.
"""

import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hora import env
from hora.errors import ConfigError


@contextmanager
def reserved_port(wanted: int | None) -> Iterator[int]:
    """Yields the port `wanted`, or a free one, and keeps it on Linux.

    Raises:
        ConfigError: somebody listens at the wanted port.
    """
    with _any_address() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            keeper.bind(("", wanted or 0))
        except OSError as error:
            raise ConfigError(_say_taken(wanted, error)) from error
        port = int(keeper.getsockname()[1])
        if sys.platform != "linux" or env.portable_only():
            keeper.close()
        yield port


def resolve(host: str) -> None:
    """Checks that `host` is known to this machine's name service.

    Raises:
        ConfigError: it is not.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--master-addr {host} must be a host name or an address that this machine can resolve, but: {error}; give node 0's address"
        ) from error


def loopback_interface() -> str | None:
    """Name of the interface that leads nowhere but here; None if it cannot be told."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def require_interface(name: str) -> None:
    """Checks that this machine has the network interface `name`.

    Raises:
        ConfigError: it has not; the message lists those that it has.
    """
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        raise ConfigError(f"there is no network interface {name!r} on this machine; choose one of: {', '.join(names)}, or leave it to Hora")


def is_this_machine(host: str) -> bool:
    """Whether `host` is a name or an address of this machine: one that a socket can be bound to."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address[0]) for family, _, _, _, address in found)


def _can_bind(family: int, address: str | int) -> bool:
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _any_address() -> socket.socket:
    """A socket to bind at all addresses, IPv4 and IPv6 where there is both, as torch's store does."""
    if not socket.has_dualstack_ipv6():
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    keeper = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    keeper.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return keeper


def _say_taken(port: int | None, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--master-port {port} is in use on this machine; leave the option out to get a free port, or name another"
    return f"--master-port {port} cannot be used: {error.strerror}; name another"
