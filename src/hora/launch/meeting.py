"""Where the processes of a job meet: the rendezvous that a launcher serves, and the line between the launchers.

On one node the rendezvous is a Unix socket in the job's private directory (a port of loopback where there are none) with a key of the job's
own, and there is nobody to talk to. `nodes` has what several nodes need, loaded when there are several.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from hora.launch import ports
from hora.launch.job_events import Shared
from hora.launch.options import LaunchOptions
from hora.launch.plan import Layout
from hora.rendezvous.address import local_address
from hora.rendezvous.ended import ended_key
from hora.rendezvous.key import new_key
from hora.rendezvous.server import Server

Deliver = Callable[[Shared], None]
"""Takes what a launcher published; may be called from any thread."""


class Line:
    """The line between the launchers of a job: what one publishes all receive in one order, the publisher included. This one is alone.

    Args:
        deliver: is given what is published.
        note: sets a key of the rendezvous.
    """

    def __init__(self, deliver: Deliver, note: Callable[[str], None] = lambda _: None) -> None:
        self._deliver = deliver
        self._note = note

    def publish(self, event: Shared) -> None:
        """Tells all launchers; does not wait until they know."""
        self._deliver(event)

    def tell_ended(self, rank: int) -> None:
        """Tells the ranks, at the rendezvous, that one of them has ended well; does not wait until they know."""
        self._note(ended_key(rank))


@dataclass(frozen=True)
class Meeting:
    """What the launcher knows of its job once all nodes have joined. `script_port` is for scripts that use torch.distributed themselves."""

    job_id: str
    rendezvous: str
    key: bytes = field(repr=False)
    script_port: int
    line: Line


def meet(options: LaunchOptions, layout: Layout, directory: Path, deliver: Deliver, release: ExitStack) -> Meeting:
    """Opens the job's rendezvous, or joins it; what was opened is closed with `release`. What is published goes to `deliver`.

    Collective: the launchers of all nodes call it.
    """
    if layout.num_nodes == 1:
        return _meet_here(options, directory, deliver, release)
    from hora.launch.nodes import meet_nodes  # here, because a job of one node should not wait for it to load

    return meet_nodes(options, layout, deliver, release)


def _meet_here(options: LaunchOptions, directory: Path, deliver: Deliver, release: ExitStack) -> Meeting:
    key, port = new_key(), release.enter_context(ports.reserved_port(options.master_port))
    server = release.enter_context(Server(local_address(directory), key).start())
    return Meeting(options.job_id or new_job_id(), server.address, key, port, Line(deliver, server.note))


def new_job_id() -> str:
    """A random name for a job."""
    return os.urandom(8).hex()
