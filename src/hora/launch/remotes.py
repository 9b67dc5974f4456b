"""The agents on other hosts, as the launcher that starts them sees them: one remote shell each, and what is said through it.

Before the ranks run, the main thread talks to all of them at once, with a deadline; afterwards the output thread hears them (`Link`). A
remote shell that ends, in whatever way, counts as the loss of its host, unless its agent has said that all is done.
"""

import os
import selectors
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hora.launch.display import Display
from hora.launch.guardian import Guardian
from hora.launch.job_events import NodeLost, Shared
from hora.launch.options import LaunchOptions
from hora.launch.others import Others
from hora.launch.output import Stream
from hora.launch.remote import Link, Remote
from hora.launch.rsh import agent_command
from hora.launch.unusable import HostsRefused, HostsUnusable

_END_S = 8.0
"""How long an agent may be silent when the job has ended."""

_READ_BYTES = 1 << 16
# The system takes no deadline that is further away than 24 days.
_LONGEST_LOOK_S = 3600.0

Fields = dict[str, Any]


def dial(options: LaunchOptions, name: str) -> Remote:
    """Starts the agent on a host.

    Raises:
        ConfigError: there is no such remote shell.
    """
    command = agent_command(name, rsh=options.rsh, python=options.remote_python, environ=os.environ)
    return Remote(name, command, options.remote_python or sys.executable)


class Remotes(Others):
    """The agents of hosts, by node. Use as a context manager: none is left afterwards."""

    def __init__(self) -> None:
        self._remotes: dict[int, Remote] = {}
        self._end: float | None = None
        self._guardian: Guardian | None = None

    def __enter__(self) -> "Remotes":
        return self

    def __exit__(self, *_: object) -> None:
        for remote in self._remotes.values():
            remote.hang_up()
        for remote in self._remotes.values():
            remote.end()

    def add(self, node: int, remote: Remote) -> None:
        """Takes in the agent of a node."""
        self._remotes[node] = remote

    @property
    def nodes(self) -> list[int]:
        """The nodes whose agents these are."""
        return sorted(self._remotes)

    @property
    def pids(self) -> Collection[int]:  # type: ignore[override]
        """Processes of the remote shells."""
        return {remote.pid for remote in self._remotes.values()}

    @property
    def lost(self) -> Collection[int]:
        """The nodes whose agents have ended, or whose remote shells have, before all was done."""
        return [node for node, remote in self._remotes.items() if remote.lost]

    def guard(self, guardian: Guardian) -> None:
        """Has the remote shells killed with this launcher."""
        self._guardian = guardian
        for pid in self.pids:
            guardian.add(pid)

    def dismiss(self, node: int) -> None:
        """Lets a host go that gets no ranks."""
        remote = self._remotes.pop(node)
        remote.hang_up()
        remote.end()

    def ask(self, messages: Mapping[int, Mapping[str, Any]], timeout_s: float) -> dict[int, Fields]:
        """Sends each agent its message and returns their answers, by node.

        Raises:
            HostsRefused: agents have refused, and all of them for something that the user gave.
            HostsUnusable: hosts cannot be used, or have not answered in time. Either names every host with what is wrong and what to do.
        """
        answers, problems = self.try_ask(messages, timeout_s)
        if problems:
            kind = HostsRefused if all(self._remotes[node].blames_user for node in problems) else HostsUnusable
            raise kind("\n      ".join(problems.values()), list(problems))
        return answers

    def try_ask(self, messages: Mapping[int, Mapping[str, Any]], timeout_s: float) -> tuple[dict[int, Fields], dict[int, str]]:
        """As `ask`, for whoever can do without some of the hosts: the answers, and what is wrong with the hosts that gave none."""
        for node, message in messages.items():
            self._remotes[node].say(message)
        waiting = {node: self._remotes[node] for node in messages}
        with selectors.DefaultSelector() as selector:
            _converse(selector, waiting.values(), time.monotonic() + timeout_s)
        problems = {node: problem for node, remote in waiting.items() if (problem := remote.problem(timeout_s))}
        return {node: remote.take_answer() for node, remote in waiting.items() if node not in problems}, problems

    def show_on(self, display: Display, ranks: Callable[[int], Sequence[int]], on_end: Callable[[], None]) -> None:
        """From now on what the agents write goes to `display`; `on_end` is called from its thread when one has written its last."""
        for node, remote in self._remotes.items():
            sinks = {(rank, number): display.sink(rank, number - 1) for rank in ranks(node) for number in (1, 2)}
            display.add(Link(remote, sinks, on_end))
            display.add(Stream(None, remote.errors, display.remark_sink(f"hora: {remote.host}: ".encode())))

    def signal(self, signum: int) -> None:
        """Passes a signal on to the ranks everywhere."""
        for remote in self._remotes.values():
            remote.say({"signal": signum})
            remote.send()

    def reap(self) -> Iterator[Shared]:
        """The hosts that are lost since the last time."""
        for node, remote in self._remotes.items():
            lost = remote.notice_end()
            if remote.ended and self._guardian is not None:
                self._guardian.discard(remote.pid)  # its number may be given to others
            if lost:
                yield NodeLost(node)

    def pending(self) -> bool:
        """Whether an agent still has something to say; one that stays silent for long is given up."""
        self._end = self._end or time.monotonic()
        return any(not remote.closed and remote.silent_s(self._end) < _END_S for remote in self._remotes.values())

    def explain_loss(self, node: int) -> str:
        """What is known of a host that is lost."""
        return self._remotes[node].explain_loss() if node in self._remotes else super().explain_loss(node)


def _converse(selector: selectors.BaseSelector, remotes: Collection[Remote], end: float) -> None:
    """Lets all of them be written to and heard until each has answered or ended, or the time is over."""
    for remote in remotes:
        for descriptor, take in remote.ears():
            selector.register(descriptor, selectors.EVENT_READ, take)
        selector.register(remote.mouth, selectors.EVENT_WRITE, remote)
    while any(remote.awaited for remote in remotes) and (left := end - time.monotonic()) > 0:
        for key, _ in selector.select(min(left, _LONGEST_LOOK_S)):
            if isinstance(key.data, Remote):
                if key.data.send():
                    selector.unregister(key.fd)
                continue
            data = os.read(key.fd, _READ_BYTES)
            if not data:
                selector.unregister(key.fd)
            key.data(data)
