"""The line between the launchers of a job's nodes: whatever one publishes, all receive in one order, the publisher included.

Messages travel over the job's rendezvous, which one of them serves (that of node 0, or the one that started the others): a counter numbers
them, a key each holds them. A launcher that dies has left a will there (see `join`), so that the others know at once.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue

from hora.launch.job_events import FailureSeen, NodeDone, NodeLost, SaveAsked, SaveSeen, Shared, StopAsked
from hora.launch.join import LOST
from hora.launch.meeting import Deliver, Line
from hora.launch.standing import StandingsAsked, StandingsTold
from hora.log import get_logger
from hora.rendezvous.client import Client

_KINDS: dict[str, type[Shared]] = {
    kind.__name__: kind for kind in (FailureSeen, NodeDone, NodeLost, SaveAsked, SaveSeen, StandingsAsked, StandingsTold, StopAsked)
}
# A wait is renewed when it ends: a quiet job is the rule.
_WAIT_S = 600.0
_FAREWELL_S = 5.0


class Agent(Line):
    """The line of the launcher of node `node_rank` of `num_nodes`, which have joined; `client` is its own and is closed with it.

    The launcher of node `server` serves the rendezvous. `deliver` is called from threads of this object.
    """

    def __init__(self, client: Client, node_rank: int, num_nodes: int, deliver: Deliver, generation: int = 0, server: int = 0) -> None:
        super().__init__(deliver, self._set)
        self._client = client
        self._node = node_rank
        self._server = server
        self._others = set(range(num_nodes)) - {node_rank}
        self._prefix = f"launch/{generation}"
        self._outgoing: SimpleQueue[Shared | str | None] = SimpleQueue()
        self._done = self._closing = self._lost = False
        self._sender = self._run(self._send)
        self._run(self._receive)
        self._run(self._watch)

    def publish(self, event: Shared) -> None:
        """Tells all launchers; returns at once."""
        self._done |= isinstance(event, NodeDone)
        self._outgoing.put(event)

    def close(self) -> None:
        """Takes leave: waits, where the rendezvous is served, until the others have heard the last message too, since they hear it from here.

        A launcher that leaves before its node is done counts as lost, like one that dies; so does one that cannot say that it leaves: the server may
        be stopped, and go on later.
        """
        self._outgoing.put(None)
        # On a line that broke each word would be tried for as long as a connection is.
        told = not self._lost and self._take_leave()
        self._closing = True
        self._client.close(take_leave=told)

    def _take_leave(self) -> bool:
        """Whether the others know, or will, that this launcher has left."""
        self._sender.join(_FAREWELL_S)
        try:
            if not self._done:
                self._client.set(LOST, b"%d" % self._node)
            self._client.set(f"{self._prefix}/left/{self._node}", b"")
        except OSError:
            return False
        if self._node == self._server:
            with suppress(OSError):
                self._client.wait([f"{self._prefix}/left/{node}" for node in sorted(self._others)], _FAREWELL_S)
        return True

    def _run(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except (OSError, ValueError) as error:
                self._lose_server(error)

        thread = threading.Thread(target=guarded, name=f"hora-agent-{work.__name__.strip('_')}", daemon=True)
        thread.start()
        return thread

    def _lose_server(self, error: Exception) -> None:
        if not self._closing:
            self._lost = True
            get_logger().debug("the line to node %d broke: %s", self._server, error)
            self._deliver(NodeLost(self._server))

    def _set(self, key: str) -> None:
        self._outgoing.put(key)

    def _send(self) -> None:
        while (event := self._outgoing.get()) is not None:
            if isinstance(event, str):
                self._client.set(event, b"")
                continue
            number = self._client.add(f"{self._prefix}/count", 1)
            self._client.set(f"{self._prefix}/message/{number}", to_wire(event))

    def _receive(self) -> None:
        number = 1
        while True:
            self._deliver(from_wire(self._await(f"{self._prefix}/message/{number}")))
            number += 1

    def _watch(self) -> None:
        node = int(self._await(LOST))
        self._others.discard(node)
        self._deliver(NodeLost(node))

    def _await(self, key: str) -> bytes:
        while True:
            with suppress(TimeoutError):
                return self._client.get(key, _WAIT_S)


def to_wire(event: Shared) -> bytes:
    """A message as bytes."""
    return json.dumps({"kind": type(event).__name__} | asdict(event)).encode()


def from_wire(message: bytes) -> Shared:
    """Reads what `to_wire` wrote.

    Raises:
        ValueError: it is no such message.
    """
    try:
        fields = json.loads(message)
        return _KINDS[fields.pop("kind")](**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message of a launcher: {message[:80]!r}") from error
