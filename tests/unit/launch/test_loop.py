"""What the launcher's loop does by itself; the rest is in tests/faults."""

import signal
from dataclasses import dataclass, field
from typing import Any, cast

from hora.launch.job_events import AskToSave
from hora.launch.loop import Loop
from hora.launch.supervisor import Supervisor


@dataclass
class Ranks:
    """Ranks that catch SIGUSR1 or do not, and the signals that were sent to them."""

    catching: bool
    sent: list[int] = field(default_factory=list)

    def catch(self, signum: int) -> bool:
        return self.catching and signum == signal.SIGUSR1

    def signal(self, signum: int) -> None:
        self.sent.append(signum)


@dataclass
class Node:
    ranks: Ranks
    display: None = None


def test_ranks_are_given_notice_once_and_when_they_understand_it() -> None:
    """A second one might come in the middle of a save that a handler makes; the first would end ranks that have none."""
    ranks = Ranks(catching=False)
    loop = Loop(Supervisor([0]), cast("Any", None), cast("Any", Node(ranks)), cast("Any", None), cast("Any", None))
    loop._do([AskToSave(), AskToSave()])
    assert ranks.sent == []
    ranks.catching = True
    loop._do([AskToSave(), AskToSave()])
    assert ranks.sent == [signal.SIGUSR1]
