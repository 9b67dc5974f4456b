"""Which network interface the ranks speak through: loopback on one node, else the one that leads to the other nodes.

Left to themselves Gloo listens wherever the host's name resolves to and NCCL on the first interface it likes: on one node too wide, on
several often wrong.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil


def choose_interface(peers: Sequence[str]) -> str | None:
    """The interface that leads to `peers` (host names or addresses; none: all ranks are on this node), or None when it cannot be told.

    The first peer that leads anywhere but to loopback counts. Nothing is sent.
    """
    if not peers:
        return interface_of("127.0.0.1")
    for peer in peers:
        with suppress(OSError):
            address = address_towards(peer)
            if not address.startswith("127."):
                return interface_of(address)
    return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`, or None."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def address_towards(host: str) -> str:
    """This node's own address on the way to `host`: a datagram socket that is connected, but sends nothing, knows it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables inside the `with` block, save those that the user has set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
