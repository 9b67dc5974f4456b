"""Which network interface the ranks speak through: loopback on one node, else the one that leads to the other nodes.

Left to themselves Gloo listens wherever the host's name resolves to and NCCL on the first interface it likes: on one node too wide, on
several often wrong.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from hora.launch.interfaces import address_towards as address_towards
from hora.launch.interfaces import interface_of as interface_of


def choose_interface(peers: Sequence[str]) -> str | None:
    """The interface that leads to `peers` (host names or addresses; none: all ranks are on this node), or None when it cannot be told.

    The first peer that leads anywhere but to loopback counts. Nothing is sent.
    """
    if not peers:
        return interface_of("127.0.0.1")
    for peer in peers:
        with suppress(OSError):
            address = address_towards(peer)
            if not address.startswith("127.") and address != "::1":
                return interface_of(address)
    return None


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
