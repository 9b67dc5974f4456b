"""Decides what the launcher of a node does: a pure state machine, events in, actions out.

Some events are seen by this launcher alone (`RankEnded`, `RankDoomed`, `SignalArrived`); others are shared: each launcher publishes what the
others must know, and all launchers, the publisher included, receive it in one order (`Shared`). What is urgent is done at once; the exit code
follows from the shared events alone, so that it is the same on all nodes. On a job of one node the published events come straight back.

Knows no process, no socket and no clock: times are seconds on a clock of the caller's that never goes back.
"""

import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from hora.launch.job_events import (
    HANG_EXIT_CODE,
    SAVED_EXIT_CODE,
    Action,
    AskToSave,
    Event,
    FailureSeen,
    Finish,
    HangFound,
    NodeDone,
    NodeLost,
    Publish,
    RankDoomed,
    RankEnded,
    RegroupWanted,
    SaveAsked,
    SaveSeen,
    Shared,
    SignalArrived,
    SignalRanks,
    StartRanks,
    StopAsked,
    TellRanks,
)


@dataclass(frozen=True)
class Patience:
    """How long each stage of ending may take, in seconds.

    Args:
        grace_s: for ranks that were asked to stop.
        suspicion_s: for the true cause to show, after a rank died that blames another.
        leaving_s: for a rank that such a one names to end, if it still runs: one that has left its job may have much to tear down.
        terminate_s: between SIGTERM and SIGKILL when a rank failed. Together with `suspicion_s` it stays well under a second.
        kill_s: for killed processes to go; the kernel may be slow to free what they held.
    """

    grace_s: float = 30.0
    suspicion_s: float = 0.2
    leaving_s: float = 5.0
    terminate_s: float = 0.3
    kill_s: float = 10.0


class Stage(enum.IntEnum):
    """How far ending the ranks has come."""

    RUNNING = 0
    STOPPING = 1
    TERMINATING = 2
    KILLING = 3
    GIVEN_UP = 4


class Supervisor:
    """Watches over `ranks`, those of node `node_rank` of `num_nodes`."""

    def __init__(self, ranks: Iterable[int], *, node_rank: int = 0, num_nodes: int = 1, patience: Patience = Patience()) -> None:
        self._node = node_rank
        self._patience = patience
        self._mine = frozenset(ranks)
        self._alive = set(self._mine)
        self._alone = num_nodes == 1
        self._running_nodes = set(range(num_nodes))
        self._stage = Stage.RUNNING
        self._stage_ends: float | None = None
        self._suspects: dict[int, RankEnded] = {}
        self._suspicion_ends: float | None = None
        self._leaving_ends = 0.0
        self._asked: set[int] = set()
        self._noticed = self._save_asked = False
        self._saved = False
        self._saved_anywhere = False
        self._failed: RankEnded | None = None
        self._told_done = False
        self._cause: Shared | None = None

    @property
    def deadline(self) -> float | None:
        """When to call `tick`; None while only events matter."""
        return min((time for time in (self._stage_ends, self._suspicion_ends) if time is not None), default=None)

    @property
    def suspicious(self) -> bool:
        """Whether a rank died of another one's end whose cause has not shown: the time to look for a `RankDoomed`."""
        return bool(self._suspects)

    @property
    def running(self) -> bool:
        """Whether nothing has begun to end the ranks."""
        return self._stage is Stage.RUNNING

    def start(self) -> list[Action]:
        """What to do first."""
        return [StartRanks()]

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`, which is seen at the time `now`."""
        match event:
            case RankEnded():
                actions = self._on_rank_ended(event, now)
            case RankDoomed():
                actions = self._fail(RankEnded(event.rank, 1), now) if self.suspicious else []
            case HangFound():
                actions = self._on_hang(event, now)
            case SignalArrived():
                actions = self._on_signal(event.signum, now)
            case RegroupWanted():
                actions = [Publish(SaveAsked(self._node))] if self.running else []
            case _:
                actions = self._on_shared(event, now)
        return actions + self._conclude(now)

    def tick(self, now: float) -> list[Action]:
        """What to do because the time has come that `deadline` names."""
        actions: list[Action] = []
        if self._suspects and self._suspicion_ends is not None and now >= self._suspicion_ends:
            if now < self._leaving_ends and self._one_may_be_ending():
                self._suspicion_ends = min(now + self._patience.suspicion_s, self._leaving_ends)
            else:
                actions += self._fail(self._likeliest(), now)
        if self._stage_ends is not None and now >= self._stage_ends:
            actions += self._escalate(now)
        return actions + self._conclude(now)

    def _on_rank_ended(self, event: RankEnded, now: float) -> list[Action]:
        self._alive.discard(event.rank)
        if event.code == 0:
            return [TellRanks(event.rank)] if self.running and (self._alive or self._running_nodes - {self._node}) else []
        if event.code == SAVED_EXIT_CODE:
            first, self._saved = not self._saved, True
            self._forget_suspects()  # they have lost a rank that saved, also if nobody is left to hear that it did
            return [Publish(SaveSeen(self._node, event.rank))] if first and self._stage is Stage.RUNNING else []
        if self._stage >= Stage.TERMINATING or self._asked:
            return []  # ended by us
        if not event.blames_peer:
            return self._fail(event, now)
        if self._stage is Stage.RUNNING and not self._saved:
            if not self._suspects:
                self._suspicion_ends, self._leaving_ends = now + self._patience.suspicion_s, now + self._patience.leaving_s
            self._suspects[event.rank] = event
        return []

    def _one_may_be_ending(self) -> bool:
        """Whether a rank that a suspect has lost has not ended yet, as far as is known here: its exit code says whether it is the cause."""
        lost = {rank for suspect in self._suspects.values() for rank in suspect.lost}
        return any(rank in self._alive or rank not in self._mine for rank in lost)

    def _likeliest(self) -> RankEnded:
        """Of the suspects the first, or the one at the end of the chain in which each has lost the next."""
        suspect, passed = next(iter(self._suspects.values())), set[int]()
        while (next_one := next((rank for rank in sorted(suspect.lost - passed) if rank in self._suspects), None)) is not None:
            passed.add(suspect.rank)
            suspect = self._suspects[next_one]
        return suspect

    def _on_hang(self, event: HangFound, now: float) -> list[Action]:
        if not self.running:
            return []
        self._failed = RankEnded(event.rank, HANG_EXIT_CODE)
        return [Publish(FailureSeen(self._node, event.rank, HANG_EXIT_CODE, event.report, event.details)), *self._terminate(now)]

    def _on_signal(self, signum: int, now: float) -> list[Action]:
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            self._noticed |= signum == signal.SIGUSR1
            return [SignalRanks(signum)]
        if signum == signal.SIGINT:
            if signal.SIGINT in self._asked:
                return [Publish(StopAsked(self._node, signal.SIGKILL)), *self._kill(now)]
        else:
            signum = signal.SIGTERM  # a terminal that hung up counts as a request to end
        publish: list[Action] = [] if signum in self._asked else [Publish(StopAsked(self._node, signum))]
        return publish + self._stop(signum, now)

    def _on_shared(self, event: Shared, now: float) -> list[Action]:
        if isinstance(event, NodeDone):
            self._saved_anywhere |= event.saved
            self._running_nodes.discard(event.node)
            return []
        if isinstance(event, NodeLost) and event.node not in self._running_nodes:
            return []  # it had nothing left to do
        if isinstance(event, SaveAsked):
            self._save_asked = True
            return [AskToSave()] if self.running else []
        self._blame(event)
        match event:
            case StopAsked(signum=signal.SIGKILL):
                return self._kill(now)
            case StopAsked():
                return [] if event.signum in self._asked else self._stop(event.signum, now)
            case SaveSeen():
                return self._await_end(now)
            case _:
                return self._terminate(now)

    def _blame(self, event: Shared) -> None:
        """Keeps what ended the job: the first event that did, but a failure outweighs a rank that merely ended early.

        A rank of this node that lost a peer is under suspicion no more: this is what happened to the peer.
        """
        self._forget_suspects()
        if self._cause is None or (isinstance(self._cause, SaveSeen) and not isinstance(event, SaveSeen)):
            self._cause = event

    def _fail(self, event: RankEnded, now: float) -> list[Action]:
        self._failed = event
        self._forget_suspects()
        return [Publish(FailureSeen(self._node, event.rank, event.code)), *self._terminate(now)]

    def _forget_suspects(self) -> None:
        self._suspects.clear()
        self._suspicion_ends = None

    def _stop(self, signum: int, now: float) -> list[Action]:
        if self._stage >= Stage.TERMINATING:
            return []
        self._asked.add(signum)
        return [SignalRanks(signum), *self._await_end(now)]

    def _await_end(self, now: float) -> list[Action]:
        return self._enter(Stage.STOPPING, now + self._patience.grace_s)

    def _terminate(self, now: float) -> list[Action]:
        return self._enter(Stage.TERMINATING, now + self._patience.terminate_s, SignalRanks(signal.SIGTERM))

    def _kill(self, now: float) -> list[Action]:
        return self._enter(Stage.KILLING, now + self._patience.kill_s, SignalRanks(signal.SIGKILL))

    def _escalate(self, now: float) -> list[Action]:
        """Goes on to the next stage; those who were asked by a signal already are not asked again."""
        if self._stage is Stage.STOPPING and not self._asked:
            return self._terminate(now)
        if self._stage < Stage.KILLING:
            return self._kill(now)
        return self._enter(Stage.GIVEN_UP, None)

    def _enter(self, stage: Stage, until: float | None, *actions: Action) -> list[Action]:
        if self._stage >= stage:
            return []
        self._stage, self._stage_ends = stage, until
        return list(actions) if self._alive else []

    def _conclude(self, now: float) -> list[Action]:
        """Tells the others when the ranks of this node are gone, and finishes when it is known how the job ended."""
        if self._alive and self._stage < Stage.GIVEN_UP:
            return []
        if self._suspects:
            # The ranks of other nodes may yet show the true cause; of this node's, none is left to do so.
            return self._fail(self._likeliest(), now) if self._alone else []
        actions: list[Action] = [] if self._told_done else [Publish(NodeDone(self._node, self._saved))]
        self._told_done = True
        if isinstance(self._cause, FailureSeen | NodeLost) or not self._running_nodes or self._stage is Stage.GIVEN_UP:
            regroup = self._save_asked and not self._noticed
            actions.append(Finish(self._exit_code(), self._cause, frozenset(self._alive), regroup=regroup))
        return actions

    def _exit_code(self) -> int:
        match self._cause or self._failed:
            case FailureSeen(code=code) | RankEnded(code=code):
                return code if code > 0 else 128 - code
            case StopAsked(signum=signal.SIGTERM):
                return SAVED_EXIT_CODE if self._saved_anywhere else 128 + signal.SIGTERM
            case StopAsked():
                return 128 + signal.SIGINT
            case SaveSeen():
                return SAVED_EXIT_CODE
            case NodeLost():
                return 1
            case _:
                return 0
