"""The engine: one thread a rank that tells rank 0 what this rank is ready for, hears what is done next, and does it.

It sleeps until something is given to it (`tray`) or a message comes (`links`). On rank 0 the same thread decides for all.
"""

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from hora import log, pulse
from hora.comm.diagnosis import Call
from hora.comm.session import Session
from hora.comm.subgroups import Subgroup
from hora.errors import HoraError
from hora.hvd.engine.choosing import make_links
from hora.hvd.engine.entry import Entry
from hora.hvd.engine.execute import Executor, absent_entry
from hora.hvd.engine.lanes import lane_for
from hora.hvd.engine.links import Arrival
from hora.hvd.engine.timeline import Timeline
from hora.hvd.engine.tray import Given, Tray
from hora.hvd.exceptions import HorovodInternalError
from hora.hvd.negotiation.coordinator import Coordinator, Stalled, Tuning
from hora.hvd.negotiation.message import Announcement, Batch, Decision
from hora.hvd.negotiation.request import Key, Kind, Request
from hora.hvd.negotiation.stalls import missing_ranks, say_end, say_missing, say_warning
from hora.hvd.negotiation.vocabulary import Phrasebook

_LAST_WORDS_S = 5.0
_LOOK_S = 1.0
_MOMENT_S = 0.2
"""Of waiting, after which rank 0 is told of it."""


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
        self.timeline = Timeline()
        self._executor = Executor(session.device, session.backend, self.timeline)
        self._lane = lane_for(session.device)
        self._groups: dict[int, Subgroup] = {}
        self._heard = 0
        self._looked_s = -math.inf
        self._over: HorovodInternalError | None = None
        self._closed = self._noted = False
        self._finished = threading.Condition(threading.Lock())
        self._released: set[Key] = set()
        self._links = make_links(session, next(session.plans))
        self._tray = Tray(self._links, tuning.cycle_s)
        self._thread = threading.Thread(target=self._run, name="hora-hvd", daemon=True)

    # For other threads --------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to listen and to work. The launcher waits for a rank as long as the stall check does."""
        pulse.mine().allow(self._tuning.stall_end_s or math.inf)
        self._thread.start()

    def register(self, set_id: int, group: Subgroup) -> None:
        """Makes a process set known. All ranks of the world call it."""
        self._groups[set_id] = group
        self._tray.put_set(set_id, group.ranks)

    def unregister(self, set_id: int) -> None:
        """Forgets a process set; nothing of it may be under way."""
        del self._groups[set_id]
        self._tray.put_set(set_id, None)

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
        self._tray.put(entry, self._rank, patient=patient)

    def hurry(self) -> None:
        """What was given is told at once: somebody waits for it."""
        self._tray.hurry()

    def wait(self, entry: Entry) -> Any:
        """The result of `entry`, when it is done.

        Raises:
            HorovodInternalError: it could not be done; says why.
        """
        if not entry.done:
            self.hurry()
            with pulse.mine().awaiting(entry.request.name), self._finished:
                self._wait(entry, gives_up=False)
        return entry.take()

    def wait_unless_needed(self, entries: Sequence[Entry]) -> str | None:
        """Waits for `entries`, unless a rank that one of them still lacks waits for this rank elsewhere, and will not give it before.

        Returns:
            The name of that one; None: all are done, well or not.
        """
        self.hurry()
        with self._finished:
            for entry in entries:
                self._released.discard(entry.key)
                with pulse.mine().awaiting(entry.request.name):
                    self._wait(entry, gives_up=True)
                if not entry.done:
                    return entry.request.name
        return None

    def _wait(self, entry: Entry, *, gives_up: bool) -> None:
        told = False
        while not entry.done and not (gives_up and entry.key in self._released):
            if self._finished.wait(None if told else _MOMENT_S) or told:
                continue
            told = True
            # While another thread than the script's own waits, the script may well go on.
            if gives_up or threading.current_thread() is threading.main_thread():
                self._tray.put_wait(entry.key, gives_up=gives_up)

    def stop(self, why: str) -> None:
        """Leaves, which ends the engines of all ranks, and says `why`; again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._tray.put_leaving(why)
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORDS_S)
        self._tell_launcher([])
        pulse.mine().allow(self._session.timeout_s)
        self.timeline.close()

    # The thread ---------------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._over is None:
                self._turn(*self._tray.take(self._idle_s()))
        except Exception as error:
            log.get_logger().debug("the engine of rank %d ends", self._rank, exc_info=True)
            why = str(error) if isinstance(error, HoraError) else f"Rank {self._rank} failed with {type(error).__name__}: {error}"
            self._end(why)
            self._tell_end(why)
        finally:
            self._links.close()
            self._tray.close()

    def _idle_s(self) -> float | None:
        """How long to sleep: without end, unless ranks are missing whose absence is to be told."""
        if self._coordinator is None or (self._coordinator.table.is_empty and not self._noted):
            return None
        limits = [limit for limit in (self._tuning.stall_warn_s, self._tuning.stall_end_s) if limit is not None]
        return min([_LOOK_S, *(limit / 4 for limit in limits)])

    def _turn(self, given: Given, arrivals: Sequence[Arrival]) -> None:
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

    def _announcement(self, given: Given) -> Announcement | None:
        if not given.fresh and not given.waits and given.leaving is None:
            return None
        said = Announcement(heard=self._heard, leaving=given.leaving, waits=given.waits)
        for entry in given.fresh:
            number = self._phrasebook.number_of(entry.request)
            if number is None:
                said.requests.append(entry.request)
            else:
                said.numbers.append(number)
        return said

    # On rank 0 ----------------------------------------------------------------------------------------------------------------------------

    def _lead(self, coordinator: Coordinator, given: Given, announced: Announcement | None, arrivals: Sequence[Arrival]) -> None:
        for set_id, ranks in given.sets:
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
        heard = coordinator.hear(rank, said, time.monotonic())
        if self.timeline.is_on:
            for request in heard:
                self.timeline.negotiating(request, rank)

    def _decide(self, coordinator: Coordinator) -> None:
        ready, decisions = coordinator.decide()
        if self.timeline.is_on:
            for one in ready:
                self.timeline.agreed(one)
        for rank, decision in decisions.items():
            if rank:
                self._links.send(rank, decision.to_bytes())
        if 0 in decisions:
            self._obey(decisions[0])

    def _look_for_stalls(self, coordinator: Coordinator) -> None:
        now, idle_s = time.monotonic(), self._idle_s()
        if idle_s is None or now < self._looked_s + idle_s / 2:  # not with each message, which would take longer than all else
            return
        self._looked_s = now
        self._tell_launcher([one for one in coordinator.awaited(now, _LOOK_S) if one.missing])
        if stalled := coordinator.stalled(now):
            log.get_logger().warning(say_warning(stalled, self._tuning.stall_warn_s or 0.0))
        if overdue := coordinator.overdue(now):
            coordinator.end(say_end(overdue, self._tuning.stall_end_s or 0.0))

    def _tell_launcher(self, stalled: Sequence[Stalled]) -> None:
        """Who is missing for what, for its report if the job hangs."""
        if stalled or self._noted:
            self._noted = bool(stalled)
            pulse.mine().note(pulse.Missing(missing_ranks(stalled), say_missing(stalled)).to_json() if stalled else "")

    # On every rank ------------------------------------------------------------------------------------------------------------------------

    def _obey(self, decision: Decision) -> None:
        self._heard = decision.serial
        for number, key in decision.learn:
            self._phrasebook.learn(number, self._known(key).request)
        for batch in decision.batches:
            self._carry_out(batch)
        self._phrasebook.forget(decision.forget)
        if decision.release:
            with self._finished:
                self._released.update(decision.release)
                self._finished.notify_all()
        if decision.end is not None:
            self._end(decision.end)

    def _carry_out(self, batch: Batch) -> None:
        keys = [self._phrasebook.key_of(entry) if isinstance(entry, int) else entry for entry in batch.entries]
        entries = [self._tray.find(key) or self._absent(key, batch.full) for key in keys]
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

    def _known(self, key: Key) -> Entry:
        entry = self._tray.find(key)
        assert entry is not None, f"rank 0 speaks of {key}, which rank {self._rank} has not announced"
        return entry

    def _absent(self, key: Key, full: Sequence[Request]) -> Entry:
        return absent_entry(next(request for request in full if request.key == key), self._session.device)

    def _finish(self, entries: Sequence[Entry], error: HorovodInternalError | None) -> None:
        self._tray.remove(entries)
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
        self._over = HorovodInternalError(f"Horovod has been shut down. {why}")
        for entry in self._tray.end(self._over):
            self._finish([entry], HorovodInternalError(f"{self._over} Rank {self._rank} waited for tensor {entry.request.name!r}."))

    def _explain(self, error: Exception) -> HorovodInternalError:
        """Who is gone, as far as can be seen."""
        everybody = tuple(range(self._world_size))
        call = Call("negotiation", 0, 0, None, self._world_size, None, time.monotonic(), everybody)
        return HorovodInternalError(str(self._session.progress.explain(call, error)))
