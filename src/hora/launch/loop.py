"""Goes round between the processes of this node and the supervisor, which decides."""

import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hora.launch import host, report
from hora.launch.display import Ranks
from hora.launch.inbox import Inbox
from hora.launch.job_events import (
    Action,
    AskToSave,
    Event,
    FailureSeen,
    Finish,
    Publish,
    RankDoomed,
    RankEnded,
    RegroupWanted,
    SignalArrived,
    SignalRanks,
    StartRanks,
    TellRanks,
)
from hora.launch.local import LocalRanks
from hora.launch.meeting import Line
from hora.launch.others import Others
from hora.launch.plan import RankPlan
from hora.launch.scout import Scout
from hora.launch.spares import Spares
from hora.launch.standing import StandingsAsked, StandingsTold
from hora.launch.supervisor import Supervisor
from hora.launch.watcher import Watcher
from hora.log import get_logger

_LOOK_S = 0.5
# A script that says nothing of its steps is taken to be in the middle of them by then: until now it needed all cores to get there.
_GOING_S = 10.0


@dataclass(frozen=True)
class Node:
    """What there is on this node: the ranks to be, their processes and output, launchers elsewhere that this one has started, spares, and who
    looks for other hosts.

    Args:
        name: of the node, for people.
        log_dir: where the log of a rank is to be found, for people.
    """

    plans: Sequence[RankPlan]
    ranks: LocalRanks
    display: Ranks
    log_dir: Path
    name: str
    others: Others = field(default_factory=Others)
    spares: Spares = field(default_factory=Spares)
    scout: Scout = field(default_factory=Scout)


class Loop:
    """Carries the supervisor's actions out and brings it the events, until it says that the job is over."""

    def __init__(self, supervisor: Supervisor, watcher: Watcher, node: Node, line: Line, inbox: Inbox) -> None:
        self._supervisor = supervisor
        self._watcher = watcher
        self._node = node
        self._ranks = node.ranks
        self._display = node.display
        self._line = line
        self._inbox = inbox
        self._memory_kills = host.count_memory_kills()
        self._finish: Finish | None = None
        self._going = time.monotonic() + _GOING_S
        self._notice_given = False

    def run(self) -> tuple[Finish, list[int]]:
        """Runs the ranks to their end; returns how the job ended, and processes that could not be killed."""
        self._inbox.collect()
        try:
            self._do(self._supervisor.start())
            while self._finish is None:
                self._turn()
        finally:
            left = self._ranks.clear()
            self._show_rest()
        return self._finish, left

    def _turn(self) -> None:
        """Waits for something to happen and does what the supervisor says."""
        for event in self._await_events():
            self._handle(event)
        if self._watched and (hang := self._watcher.tick(time.monotonic())) is not None:
            self._handle(hang)
        if self._watched and (self._watcher.under_way or time.monotonic() >= self._going):
            self._node.spares.tend()
        if self._supervisor.running and self._node.scout.tend(time.monotonic()):
            self._handle(RegroupWanted())
        if (deadline := self._supervisor.deadline) is not None and time.monotonic() >= deadline:
            self._look_for_the_doomed()
            self._do(self._supervisor.tick(time.monotonic()))

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, StandingsAsked | StandingsTold):
            hang = self._watcher.handle(event, now)
            if hang is None:
                return
            event = hang
        if isinstance(event, FailureSeen) and event.details:
            self._display.keep(event.details)
        self._do(self._supervisor.handle(event, now))

    @property
    def _watched(self) -> bool:
        """Whether ranks are expected to make progress."""
        return self._supervisor.running and bool(self._ranks.alive())

    def _look_for_the_doomed(self) -> None:
        """A large process may take longer to end after its traceback than others take to notice that it is going."""
        for rank in self._ranks.alive():
            if self._supervisor.suspicious and report.is_doomed(self._display.tail(rank)):
                self._do(self._supervisor.handle(RankDoomed(rank), time.monotonic()))

    def _await_events(self) -> Iterable[Event]:
        deadlines = [self._supervisor.deadline, self._watcher.deadline if self._watched else None]
        deadlines += [self._node.scout.deadline if self._supervisor.running else None]
        deadline = min((time for time in deadlines if time is not None), default=None)
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        for signum in self._inbox.wait(timeout_s):
            yield SignalArrived(signum)
        for rank, code in self._ranks.reap():
            yield self._ended(rank, code)
        yield from self._node.others.reap()
        yield from self._inbox.delivered()

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case StartRanks():
                    self._ranks.start(self._node.plans, self._display)
                case SignalRanks(signum):
                    self._ranks.signal(signum)
                    self._pass_on(signum)
                case AskToSave():
                    self._ask_to_save()
                case TellRanks(rank):
                    self._line.tell_ended(rank)
                case Publish(event):
                    self._line.publish(self._with_report(event) if isinstance(event, FailureSeen) and not event.report else event)
                case Finish():
                    self._finish = self._finish or action

    def _ask_to_save(self) -> None:
        """Gives the ranks notice, if they understand it: it would end those that do not. Once, since it may come in the middle of a save."""
        if self._notice_given:
            return
        if self._ranks.catch(signal.SIGUSR1):
            self._notice_given = True
            self._ranks.signal(signal.SIGUSR1)
        else:
            get_logger().debug("the ranks of this node do not catch SIGUSR1 and are not asked to save")

    def _pass_on(self, signum: int) -> None:
        """What ends the job the launchers tell each other; the rest this one tells those that it started."""
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            self._node.others.signal(signum)

    def _ended(self, rank: int, code: int) -> RankEnded:
        # NCCL's watchdog aborts the process when another rank is gone; any other signal came from outside.
        tail = self._display.tail(rank) if code > 0 or code == -signal.SIGABRT else b""
        return RankEnded(rank, code, True, report.lost_peers(tail)) if report.blames_peer(tail) else RankEnded(rank, code)

    def _with_report(self, failure: FailureSeen) -> FailureSeen:
        kills = host.count_memory_kills()
        casualty = report.Casualty(
            rank=failure.rank,
            host=self._node.name,
            pid=self._ranks.pid(failure.rank),
            code=failure.code,
            log=str(self._node.log_dir / f"rank{failure.rank}.log"),
            tail=self._display.tail(failure.rank),
            memory_kills=None if kills is None or self._memory_kills is None else kills - self._memory_kills,
        )
        return replace(failure, report=report.describe(casualty))

    def _show_rest(self) -> None:
        """Waits until the screen has taken everything; a user who does not want to wait presses Ctrl-C."""
        with self._inbox.interruptible():
            while self._node.others.pending() and signal.SIGINT not in self._inbox.wait(_LOOK_S):
                self._ranks.reap()
        self._display.finish()
        with self._inbox.interruptible():
            while not self._display.ended and signal.SIGINT not in self._inbox.wait(None):
                pass
