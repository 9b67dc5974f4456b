"""The engine: one thread a rank that tells rank 0 what this rank is ready for, hears what is done next, and does it.

It sleeps until something is given to it or a message comes. What is given is gathered for a cycle before it is told, unless somebody waits for
it or there is much of it. On rank 0 the same thread decides for all.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from hora import log
from hora.comm.diagnosis import Call
from hora.comm.session import Session
from hora.comm.subgroups import Subgroup
from hora.errors import CollectiveError, HoraError
from hora.hvd.engine.entry import Entry
from hora.hvd.engine.execute import Executor, absent_entry
from hora.hvd.engine.lanes import lane_for
from hora.hvd.engine.links import Links
from hora.hvd.engine.timeline import Timeline
from hora.hvd.exceptions import HorovodInternalError
from hora.hvd.negotiation.coordinator import Coordinator, Tuning
from hora.hvd.negotiation.message import Announcement, Batch, Decision
from hora.hvd.negotiation.request import Key, Kind, Request
from hora.hvd.negotiation.stalls import say_end, say_warning
from hora.hvd.negotiation.vocabulary import Phrasebook

_MUCH_BYTES = 4 * 2**20
_PATIENT_S = 0.02
_LAST_WORDS_S = 5.0
_LOOK_S = 1.0

_DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently being processed. If you "
    "want to request another tensor, use a different tensor name."
)


_Heard = Announcement | Decision | Exception
"""What comes from another rank; an exception where nothing will come any more."""


class _Inbox(NamedTuple):
    """What there is to do."""

    fresh: list[Entry]
    messages: list[tuple[int, _Heard]]
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
        self._pending: dict[Key, Entry] = {}
        self._heard = 0
        self._over: HorovodInternalError | None = None
        self._present = set(range(1, session.world_size)) if session.rank == 0 else set()
        self._said_goodbye = False
        # What other threads leave for this one, and how they wake it.
        self._wake = threading.Condition()
        self._fresh: list[Entry] = []
        self._fresh_bytes = 0
        self._due = 0.0
        self._messages: deque[tuple[int, _Heard]] = deque()
        self._registered: list[tuple[int, Sequence[int] | None]] = []
        self._leaving: str | None = None
        self._said_leaving = False
        self._finished = threading.Condition()
        self._closed = False
        self._links = Links(session.rank, session.world_size, session.timeout_s)
        self._thread = threading.Thread(target=self._run, name="hora-hvd", daemon=True)

    # For other threads --------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to listen and to work."""
        self._links.listen(self._deliver, self._lose)
        self._thread.start()

    def register(self, set_id: int, group: Subgroup) -> None:
        """Makes a process set known. All ranks of the world call it."""
        with self._wake:
            self._groups[set_id] = group
            self._registered.append((set_id, group.ranks))
            self._wake.notify()

    def unregister(self, set_id: int) -> None:
        """Forgets a process set; nothing of it may be under way."""
        with self._wake:
            del self._groups[set_id]
            self._registered.append((set_id, None))
            self._wake.notify()

    def give(self, entry: Entry, *, patient: bool = False) -> None:
        """Has `entry` done when all ranks of its process set have given one of its name.

        Args:
            entry: its tensors belong to the engine until it is done.
            patient: somebody will soon wait for it, or give more: it need not be told at once.

        Raises:
            ValueError: one of this name is under way.
            HorovodInternalError: the engine has ended; says why.
        """
        self._lane.give(entry)
        request = entry.request
        with self._wake:
            if self._over is not None:
                raise HorovodInternalError(str(self._over))
            if request.key in self._pending:
                raise ValueError(f"{_DUPLICATE} Rank {self._rank}, tensor {request.name!r}.")
            self._pending[request.key] = entry
            now = time.monotonic()
            due = now + (_PATIENT_S if patient else self._tuning.cycle_s)
            first = not self._fresh
            earlier = first or due < self._due
            self._fresh.append(entry)
            self._fresh_bytes += request.size_bytes
            if self._fresh_bytes >= _MUCH_BYTES:
                due = now
            if first or due < self._due:
                self._due = due
            if earlier or due <= now:
                self._wake.notify()

    def hurry(self) -> None:
        """What was given is told at once: somebody waits for it."""
        with self._wake:
            if self._fresh and self._due:
                self._due = 0.0
                self._wake.notify()

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
        with self._wake:
            self._leaving = why
            self._wake.notify()
        self._thread.join(4 * _LAST_WORDS_S)
        self._links.close(_LAST_WORDS_S)
        self.timeline.close()

    def _deliver(self, peer: int, message: bytes) -> bool:
        """Hands on what has come; whether it is the last: each side's last message says so, and who listened on would keep the group for ever."""
        try:
            heard: _Heard = Announcement.from_bytes(message) if self._rank == 0 else Decision.from_bytes(message)
        except CollectiveError as error:
            heard = error
        with self._wake:
            self._messages.append((peer, heard))
            self._wake.notify()
        return isinstance(heard, Exception) or (heard.leaving if isinstance(heard, Announcement) else heard.end) is not None

    def _lose(self, peer: int, error: RuntimeError) -> None:
        with self._wake:
            self._messages.append((peer, error))
            self._wake.notify()

    # The thread ---------------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._over is None or self._leaving is None:
                self._turn(self._next())
            self._await_last_words()
        except Exception as error:
            log.get_logger().debug("the engine of rank %d ends", self._rank, exc_info=True)
            why = str(error) if isinstance(error, HoraError) else f"Rank {self._rank} failed with {type(error).__name__}: {error}"
            self._say_goodbye(why)
            self._end(why)

    def _turn(self, inbox: _Inbox) -> None:
        announced = self._announcement(inbox.fresh, inbox.leaving)
        if self._coordinator is None:
            if announced is not None and self._over is None:
                self._links.send(0, announced.to_bytes())
            for _, message in inbox.messages:
                if not isinstance(message, Decision):
                    raise self._explain(message)
                self._obey(message)
            return
        for set_id, ranks in inbox.registered:
            self._note_set(set_id, ranks)
        if announced is not None:
            self._hear(0, announced)
        for peer, message in inbox.messages:
            self._hear_from(peer, message)
        self._look_for_stalls()
        self._decide()

    def _next(self) -> _Inbox:
        """Waits until there is something to do; takes it."""
        with self._wake:
            while not (self._messages or self._registered or self._is_to_leave):
                now = time.monotonic()
                if self._fresh and now >= self._due:
                    break
                pause_s = self._due - now if self._fresh else self._idle_s()
                if not self._wake.wait(pause_s) and not self._fresh:
                    break
            leaving, fresh = self._leaving if self._is_to_leave else None, []
            self._said_leaving = self._said_leaving or leaving is not None
            if self._fresh and (time.monotonic() >= self._due or leaving is not None):
                fresh, self._fresh, self._fresh_bytes = self._fresh, [], 0
            inbox = _Inbox(fresh, list(self._messages), self._registered, leaving)
            self._messages.clear()
            self._registered = []
            return inbox

    @property
    def _is_to_leave(self) -> bool:
        return self._leaving is not None and not self._said_leaving

    def _idle_s(self) -> float | None:
        """How long to sleep: without end, unless ranks are missing whose absence is to be told."""
        if self._coordinator is None or self._coordinator.table.is_empty:
            return None
        limits = [limit for limit in (self._tuning.stall_warn_s, self._tuning.stall_end_s) if limit is not None]
        return min(_LOOK_S, *(limit / 4 for limit in limits)) if limits else None

    def _announcement(self, fresh: Sequence[Entry], leaving: str | None) -> Announcement | None:
        if not fresh and leaving is None:
            return None
        said = Announcement(heard=self._heard, leaving=leaving)
        for entry in fresh:
            number = self._phrasebook.number_of(entry.request)
            if number is None:
                said.requests.append(entry.request)
            else:
                said.numbers.append(number)
        return said

    # On rank 0 ----------------------------------------------------------------------------------------------------------------------------

    def _note_set(self, set_id: int, ranks: Sequence[int] | None) -> None:
        if self._coordinator is None:
            return
        if ranks is None:
            self._coordinator.table.unregister(set_id)
        else:
            self._coordinator.table.register(set_id, ranks)

    def _hear_from(self, peer: int, heard: _Heard) -> None:
        if isinstance(heard, Announcement):
            if heard.leaving is not None:
                self._dismiss(peer, heard.leaving)
            self._hear(peer, heard)
        elif peer in self._present:
            self._present.discard(peer)
            if self._over is None:
                assert isinstance(heard, Exception)
                self._require_coordinator().end(str(self._explain(heard)))

    def _dismiss(self, peer: int, why: str) -> None:
        """A rank has spoken its last; it must still hear the end."""
        if peer in self._present:
            self._present.discard(peer)
            if self._over is None:
                self._last_words_to(peer, why)

    def _hear(self, rank: int, said: Announcement) -> None:
        for request in self._require_coordinator().hear(rank, said, time.monotonic()):
            self.timeline.negotiating(request, rank)

    def _decide(self) -> None:
        ready, decisions = self._require_coordinator().decide()
        for one in ready:
            self.timeline.agreed(one)
        for rank in sorted(self._present):
            if rank in decisions:
                self._links.send(rank, decisions[rank].to_bytes())
        if 0 in decisions:
            self._obey(decisions[0])

    def _look_for_stalls(self) -> None:
        coordinator, now = self._require_coordinator(), time.monotonic()
        if self._over is not None or coordinator.table.is_empty:
            return
        if stalled := coordinator.stalled(now):
            log.get_logger().warning(say_warning(stalled, self._tuning.stall_warn_s or 0.0))
        if overdue := coordinator.overdue(now):
            coordinator.end(say_end(overdue, self._tuning.stall_end_s or 0.0))

    def _require_coordinator(self) -> Coordinator:
        assert self._coordinator is not None
        return self._coordinator

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
        with self._wake:
            for entry in entries:
                self._pending.pop(entry.request.key, None)
        with self._finished:
            for entry in entries:
                entry.error = error
                entry.done = True
            self._finished.notify_all()

    # The end ------------------------------------------------------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        """Nothing is done any more; what is waited for fails."""
        with self._wake:
            if self._over is None:
                self._over = HorovodInternalError(f"Horovod has been shut down. {why}")
            pending = list(self._pending.values())
            self._fresh, self._fresh_bytes = [], 0
        self._finish(pending, self._over)
        if self._rank != 0 and not self._said_leaving:
            self._say_goodbye("")

    def _say_goodbye(self, why: str) -> None:
        """Tells rank 0, or on rank 0 all others, that this rank listens no more; once."""
        if self._said_goodbye or self._over is not None and self._rank == 0:
            return
        self._said_goodbye = True
        if self._rank == 0:
            for rank in sorted(self._present):
                self._last_words_to(rank, why)
            return
        try:
            self._links.send(0, Announcement(heard=self._heard, leaving=why).to_bytes())
        except RuntimeError:
            log.get_logger().debug("rank %d could not say that it leaves", self._rank, exc_info=True)

    def _last_words_to(self, rank: int, why: str) -> None:
        try:
            self._links.send(rank, Decision(serial=0, end=why).to_bytes())
        except RuntimeError:
            log.get_logger().debug("rank %d is gone already", rank, exc_info=True)

    def _await_last_words(self) -> None:
        """On rank 0: what the others still say is heard, so that their messages find somebody."""
        end = time.monotonic() + _LAST_WORDS_S
        while self._present and time.monotonic() < end:
            with self._wake:
                if not self._messages:
                    self._wake.wait(max(0.0, end - time.monotonic()))
                messages = list(self._messages)
                self._messages.clear()
            for peer, heard in messages:
                if not isinstance(heard, Announcement) or heard.leaving is not None:
                    self._present.discard(peer)

    def _explain(self, error: object) -> HorovodInternalError:
        """Who is gone, as far as can be seen."""
        if not isinstance(error, RuntimeError):
            return HorovodInternalError(str(error))
        everybody = tuple(range(self._world_size))
        call = Call("negotiation", 0, 0, None, self._world_size, None, time.monotonic(), everybody)
        return HorovodInternalError(str(self._session.progress.explain(call, error)))


__all__ = ["Engine"]
