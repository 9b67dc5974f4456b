"""What the engine sleeps on: messages of other ranks, and threads of this one that ring."""

import select
import socket

from hora.hvd.engine.links import Arrival, Links

_RINGS = 4096
# The system takes no deadline that is further away than 24 days.
_LONGEST_WAIT_S = 3600.0


class Alarm:
    """Wakes the engine.

    Args:
        links: whose messages wake it.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._is_set = False

    def set(self) -> None:
        """The engine is about to wait; called with the lock held under which others `ring`."""
        self._is_set = True

    def ring(self) -> None:
        """Wakes the engine, if it waits or is about to."""
        if self._is_set:
            self._is_set = False
            self._bell.send(b"\0")

    def wait(self, timeout_s: float | None) -> list[Arrival]:
        """Waits until somebody rings, something comes, or `timeout_s` has passed; what has come."""
        poll, ear = select.poll(), self._ear.fileno()
        poll.register(ear, select.POLLIN)
        for descriptor in self._links.sockets():
            poll.register(descriptor, select.POLLIN)
        for descriptor in self._links.unsent():
            poll.modify(descriptor, select.POLLIN | select.POLLOUT)
        arrivals: list[Arrival] = []
        for descriptor, event in poll.poll(None if timeout_s is None else 1000 * min(max(0.0, timeout_s), _LONGEST_WAIT_S)):
            if descriptor == ear:
                self._ear.recv(_RINGS)
                continue
            if event & select.POLLOUT:
                self._links.flush()
            if event & ~select.POLLOUT:
                arrivals += self._links.take(descriptor)
        return arrivals

    def close(self) -> None:
        """Lets go of the sockets."""
        self._is_set = False
        self._bell.close()
        self._ear.close()
