"""The engine: one thread a rank that tells rank 0 what this rank is ready for, hears what is done next, and does it.

It sleeps until something is given to it or a message comes. What is given is gathered for a cycle before it is told, unless somebody waits for
it or there is much of it. On rank 0 the same thread decides for all.
"""

import math
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hora import log
from hora.comm.diagnosis import Call
from hora.comm.session import Session
from hora.comm.subgroups import Subgroup
from hora.errors import HoraError
from hora.hvd.engine.alarm import Alarm
from hora.hvd.engine.choosing import make_links
from hora.hvd.engine.entry import Entry
from hora.hvd.engine.execute import Executor, absent_entry
from hora.hvd.engine.lanes import lane_for
from hora.hvd.engine.links import Arrival
from hora.hvd.engine.timeline import Timeline
from hora.hvd.exceptions import HorovodInternalError
from hora.hvd.negotiation.coordinator import Coordinator, Tuning
from hora.hvd.negotiation.message import Announcement, Batch, Decision
from hora.hvd.negotiation.request import Key, Kind, Request
from hora.hvd.negotiation.stalls import say_end, say_warning
from hora.hvd.negotiation.vocabulary import Phrasebook

_MUCH_BYTES = 4 * 2**20
_LONGEST_CYCLE_S = 0.02
_LAST_WORDS_S = 5.0
_LOOK_S = 1.0

_DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently being processed. If you "
    "want to request another tensor, use a different tensor name."
)


class _Given(NamedTuple):
    """What other threads have left to do."""

    fresh: list[Entry]
    registered: list[tuple[int, Sequence[int] | None]]
    leaving: str | None


class Engine:
    """The engine of one rank.

    Collective: all ranks make it, in a session, and `start` it.

    Args:
        session: the job.
        tuning: the same on all ranks.
    """

    def __init__(self, session: Session, tuning: Tuning) -> None:
        self._session = session
        self._tuning = tuning
        self._rank, self._world_size = session.rank, session.world_size
        self._coordinator = Coordinator(session.world_size, tuning) if session.rank == 0 else None
        self._phrasebook = Phrasebook()
        self._executor = Executor(session.device)
        self._lane = lane_for(session.device)
        self.timeline = Timeline()
        self._groups: dict[int, Subgroup] = {}
        self._heard = 0
        self._over: HorovodInternalError | None = None
        self._closed = False
        # What other threads leave for this one.
        self._lock = threading.Lock()
        self._pending: dict[Key, Entry] = {}
        self._fresh: list[Entry] = []
        self._fresh_bytes = 0
        self._due = self._latest = math.inf
        self._registered: list[tuple[int, Sequence[int] | None]] = []
        self._leaving: str | None = None
        self._finished = threading.Condition(threading.Lock())
        self._links = make_links(session, next(session.plans))
        self._alarm = Alarm(self._links)
        self._thread = threading.Thread(target=self._run, name="hora-hvd", daemon=True)

    # For other threads --------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to listen and to work."""
        self._thread.start()

    def register(self, set_id: int, group: Subgroup) -> None:
        """Makes a process set known. All ranks of the world call it."""
        with self._lock:
            self._groups[set_id] = group
            self._registered.append((set_id, group.ranks))
            self._alarm.ring()

    def unregister(self, set_id: int) -> None:
        """Forgets a process set; nothing of it may be under way."""
        with self._lock:
            del self._groups[set_id]
            self._registered.append((set_id, None))
            self._alarm.ring()

    def give(self, entry: Entry, *, patient: bool = False) -> None:
        """Has `entry` done when all ranks of its process set have given one of its name.

        Args:
            entry: its tensors belong to the engine until it is done.
            patient: it need not be told before somebody waits for it, or there is much to tell.

        Raises:
            ValueError: one of this name is under way.
            HorovodInternalError: the engine has ended; says why.
        """
        self._lane.give(entry)
        request = entry.request
        key, size_bytes = entry.key, sum(tensor.nbytes for tensor in entry.tensors)
        with self._lock:
            if self._over is not None:
                raise HorovodInternalError(str(self._over))
            if key in self._pending:
                raise ValueError(f"{_DUPLICATE} Rank {self._rank}, tensor {request.name!r}.")
            self._pending[key] = entry
            self._fresh.append(entry)
            self._fresh_bytes += size_bytes
            if self._fresh_bytes >= _MUCH_BYTES:
                self._tell_by(0.0)
            elif not patient:
                self._begin_cycle(time.monotonic())

    def _begin_cycle(self, now: float) -> None:
        """What was given is told after a cycle. Whoever gives one after the other is not interrupted: it begins anew with each, up to a limit."""
        due = now + self._tuning.cycle_s
        if self._due == math.inf:
            self._latest = now + max(_LONGEST_CYCLE_S, self._tuning.cycle_s)
            self._tell_by(due)
        elif self._due:
            self._due = min(max(self._due, due), self._latest)

    def _tell_by(self, due: float) -> None:
        """Has the engine tell what was given at the time `due`, at the latest."""
        if due < self._due:
            self._due = due
            self._alarm.ring()

    def hurry(self) -> None:
        """What was given is told at once: somebody waits for it."""
        with self._lock:
            if self._fresh:
                self._tell_by(0.0)

    def wait(self, entry: Entry) -> Any:
        """The result of `entry`, when it is done.

        Raises:
            HorovodInternalError: it could not be done; says why.
        """
        if not entry.done:
            self.hurry()
            with self._finished:
                while not entry.done:
                    self._finished.wait()
        return entry.take()

    def stop(self, why: str) -> None:
        """Leaves, which ends the engines of all ranks, and says `why`; again does nothing."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            self._leaving = why
            self._alarm.ring()
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORDS_S)
        self.timeline.close()

    # The thread ---------------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        said_leaving = False
        try:
            while self._over is None:
                given, arrivals = self._next(said_leaving)
                said_leaving = said_leaving or given.leaving is not None
                self._turn(given, arrivals)
        except Exception as error:
            log.get_logger().debug("the engine of rank %d ends", self._rank, exc_info=True)
            why = str(error) if isinstance(error, HoraError) else f"Rank {self._rank} failed with {type(error).__name__}: {error}"
            self._tell_end(why)
            self._end(why)
        finally:
            self._links.close()
            self._alarm.close()

    def _next(self, said_leaving: bool) -> tuple[_Given, list[Arrival]]:
        """Waits until there is something to do; takes it."""
        while True:
            now = time.monotonic()
            with self._lock:
                leaving = None if said_leaving else self._leaving
                is_due = bool(self._fresh) and (now >= self._due or leaving is not None)
                given = _Given(self._fresh if is_due else [], self._registered, leaving)
                self._registered = []
                if is_due:
                    self._fresh, self._fresh_bytes, self._due = [], 0, math.inf
                pause_s = self._idle_s() if self._due == math.inf else self._due - now
                if given.fresh or given.registered or leaving is not None:
                    pause_s = 0.0
                self._alarm.set()
            arrivals = self._alarm.wait(pause_s)
            if any(given) or arrivals or (pause_s and self._due == math.inf):
                return given, arrivals

    def _idle_s(self) -> float | None:
        """How long to sleep: without end, unless ranks are missing whose absence is to be told."""
        if self._coordinator is None or self._coordinator.table.is_empty:
            return None
        limits = [limit for limit in (self._tuning.stall_warn_s, self._tuning.stall_end_s) if limit is not None]
        return min(_LOOK_S, *(limit / 4 for limit in limits)) if limits else None

    def _turn(self, given: _Given, arrivals: Sequence[Arrival]) -> None:
        announced = self._announcement(given)
        if self._coordinator is not None:
            self._lead(self._coordinator, given, announced, arrivals)
            return
        if announced is not None:
            self._links.send(0, announced.to_bytes())
        for arrival in arrivals:
            if isinstance(arrival.content, Exception):
                raise self._explain(arrival.content)
            self._obey(Decision.from_bytes(arrival.content))

    def _announcement(self, given: _Given) -> Announcement | None:
        if not given.fresh and given.leaving is None:
            return None
        said = Announcement(heard=self._heard, leaving=given.leaving)
        for entry in given.fresh:
            number = self._phrasebook.number_of(entry.request)
            if number is None:
                said.requests.append(entry.request)
            else:
                said.numbers.append(number)
        return said

    # On rank 0 ----------------------------------------------------------------------------------------------------------------------------

    def _lead(self, coordinator: Coordinator, given: _Given, announced: Announcement | None, arrivals: Sequence[Arrival]) -> None:
        for set_id, ranks in given.registered:
            if ranks is None:
                coordinator.table.unregister(set_id)
            else:
                coordinator.table.register(set_id, ranks)
        if announced is not None:
            self._hear(coordinator, 0, announced)
        for peer, content in arrivals:
            if isinstance(content, Exception):
                coordinator.end(str(self._explain(content)))
            else:
                self._hear(coordinator, peer, Announcement.from_bytes(content))
        self._look_for_stalls(coordinator)
        self._decide(coordinator)

    def _hear(self, coordinator: Coordinator, rank: int, said: Announcement) -> None:
        for request in coordinator.hear(rank, said, time.monotonic()):
            self.timeline.negotiating(request, rank)

    def _decide(self, coordinator: Coordinator) -> None:
        ready, decisions = coordinator.decide()
        for one in ready:
            self.timeline.agreed(one)
        for rank, decision in decisions.items():
            if rank:
                self._links.send(rank, decision.to_bytes())
        if 0 in decisions:
            self._obey(decisions[0])

    def _look_for_stalls(self, coordinator: Coordinator) -> None:
        if coordinator.table.is_empty:
            return
        now = time.monotonic()
        if stalled := coordinator.stalled(now):
            log.get_logger().warning(say_warning(stalled, self._tuning.stall_warn_s or 0.0))
        if overdue := coordinator.overdue(now):
            coordinator.end(say_end(overdue, self._tuning.stall_end_s or 0.0))

    # On every rank ------------------------------------------------------------------------------------------------------------------------

    def _obey(self, decision: Decision) -> None:
        self._heard = decision.serial
        for number, key in decision.learn:
            self._phrasebook.learn(number, self._pending[key].request)
        for batch in decision.batches:
            self._carry_out(batch)
        self._phrasebook.forget(decision.forget)
        if decision.end is not None:
            self._end(decision.end)

    def _carry_out(self, batch: Batch) -> None:
        keys = [self._phrasebook.key_of(entry) if isinstance(entry, int) else entry for entry in batch.entries]
        entries = [self._pending.get(key) or self._absent(key, batch.full) for key in keys]
        if batch.error is not None:
            self._finish(entries, HorovodInternalError(batch.error))
            return
        first = entries[0].request
        if first.kind is Kind.JOIN:
            entries[0].result = batch.last_joined
        elif first.kind is not Kind.BARRIER:
            with self.timeline.working(entries), self._lane.work(entries):
                self._executor.run(entries, batch.same_rows, self._groups[first.set_id])
        self._finish(entries, None)

    def _absent(self, key: Key, full: Sequence[Request]) -> Entry:
        return absent_entry(next(request for request in full if request.key == key), self._session.device)

    def _finish(self, entries: Sequence[Entry], error: Exception | None) -> None:
        with self._lock:
            for entry in entries:
                self._pending.pop(entry.key, None)
        with self._finished:
            for entry in entries:
                entry.error = error
                entry.done = True
            self._finished.notify_all()

    # The end ------------------------------------------------------------------------------------------------------------------------------

    def _tell_end(self, why: str) -> None:
        """This rank cannot go on: tells rank 0, or on rank 0 everybody."""
        if self._coordinator is None:
            self._links.send(0, Announcement(heard=self._heard, leaving=why).to_bytes())
            return
        self._coordinator.end(why)
        for rank, decision in self._coordinator.decide()[1].items():
            if rank:
                self._links.send(rank, decision.to_bytes())

    def _end(self, why: str) -> None:
        """Nothing is done any more; what is waited for fails."""
        with self._lock:
            if self._over is None:
                self._over = HorovodInternalError(f"Horovod has been shut down. {why}")
            pending = list(self._pending.values())
            self._fresh, self._fresh_bytes = [], 0
        self._finish(pending, self._over)

    def _explain(self, error: Exception) -> HorovodInternalError:
        """Who is gone, as far as can be seen."""
        everybody = tuple(range(self._world_size))
        call = Call("negotiation", 0, 0, None, self._world_size, None, time.monotonic(), everybody)
        return HorovodInternalError(str(self._session.progress.explain(call, error)))
