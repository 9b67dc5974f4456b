"""Messages between rank 0 and every other rank: over Unix sockets where all ranks share a host, else over a Gloo group of their own.

Whoever waits for messages waits for readable sockets; with Gloo a thread for each peer waits, and says so on a pair of sockets. Neither costs
anything meanwhile. On one host no other thread stands between two engines, which there makes an answer ten times as fast.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

LENGTH_BYTES = 4
LONGEST_BYTES = 2**31


class Arrival(NamedTuple):
    """What has come from a peer: a message, or the reason why none will come any more."""

    peer: int
    content: bytes | Exception


class Links(ABC):
    """The links of one rank: to all others on rank 0, to rank 0 on others."""

    @abstractmethod
    def sockets(self) -> Sequence[int]:
        """File descriptors that become readable when there is something for `take`."""

    @abstractmethod
    def take(self, ready: int) -> list[Arrival]:
        """What has come over a descriptor that is readable."""

    def unsent(self) -> Sequence[int]:
        """Those over which something is still to be sent, by `flush`, when they become writable."""
        return ()

    def flush(self) -> None:  # noqa: B027 (most links send at once)
        """Sends of that what can be sent without waiting."""

    @abstractmethod
    def send(self, peer: int, message: bytes) -> None:
        """Sends `message`; returns before it has been read. That a peer is gone is told by what comes from it."""

    @abstractmethod
    def close(self) -> None:
        """Ends the links."""


class NoLinks(Links):
    """Those of a world of one."""

    def sockets(self) -> Sequence[int]:
        """None."""
        return ()

    def take(self, ready: int) -> list[Arrival]:  # noqa: ARG002 (never called)
        """Nothing."""
        return []

    def send(self, peer: int, message: bytes) -> None:
        """Never called: there is nobody."""
        raise AssertionError(f"a rank alone has nobody to send {len(message)} bytes to, but was asked to send them to rank {peer}")

    def close(self) -> None:
        """Does nothing."""
