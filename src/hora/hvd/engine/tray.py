"""What other threads leave for the engine: operations, process sets, the word to leave. And how long it sleeps until it looks.

Operations are gathered for a cycle before they are told, unless somebody waits for one or there is much of them.
"""

import math
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hora.errors import ConfigError
from hora.hvd.engine.alarm import Alarm
from hora.hvd.engine.entry import Entry
from hora.hvd.engine.links import Arrival, Links
from hora.hvd.exceptions import HorovodInternalError
from hora.hvd.negotiation.request import Key

_MUCH_BYTES = 4 * 2**20
_LONGEST_CYCLE_S = 0.02

_DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently being processed. If you "
    "want to request another tensor, use a different tensor name."
)


class Given(NamedTuple):
    """What was left.

    Attributes:
        fresh: operations that are to be told now.
        sets: process sets with their ranks, or None for those to forget.
        leaving: why this rank leaves; None: it stays.
        waits: operations that the script has waited for longer than a moment, and whether it can give that up.
    """

    fresh: list[Entry]
    sets: list[tuple[int, Sequence[int] | None]]
    leaving: str | None
    waits: list[tuple[Key, bool]]


class Tray:
    """The tray of one engine.

    Args:
        links: whose messages end its sleep too.
        cycle_s: how long operations are gathered.
    """

    def __init__(self, links: Links, cycle_s: float) -> None:
        self._alarm = Alarm(links)
        self._cycle_s = cycle_s
        self._lock = threading.Lock()
        self._over: HorovodInternalError | None = None
        self._pending: dict[Key, Entry] = {}
        self._fresh: list[Entry] = []
        self._fresh_bytes = 0
        self._due = self._latest = math.inf
        self._sets: list[tuple[int, Sequence[int] | None]] = []
        self._leaving: str | None = None
        self._waits: list[tuple[Key, bool]] = []

    # For other threads --------------------------------------------------------------------------------------------------------------------

    def put(self, entry: Entry, rank: int, *, patient: bool) -> None:
        """Leaves an operation.

        Raises:
            ValueError: one of this name is under way.
            HorovodInternalError: nothing is done any more; says why.
        """
        size_bytes = sum(tensor.nbytes for tensor in entry.tensors)
        with self._lock:
            if self._over is not None:
                raise HorovodInternalError(f"{self._over} Rank {rank} asked for tensor {entry.request.name!r} after that.")
            if entry.key in self._pending:
                raise ConfigError(f"{_DUPLICATE} Rank {rank}, tensor {entry.request.name!r}.")
            self._pending[entry.key] = entry
            self._fresh.append(entry)
            self._fresh_bytes += size_bytes
            if self._fresh_bytes >= _MUCH_BYTES:
                self._tell_by(0.0)
            elif not patient:
                self._begin_cycle(time.monotonic())

    def hurry(self) -> None:
        """What was left is to be told at once: somebody waits for it."""
        with self._lock:
            if self._fresh:
                self._tell_by(0.0)

    def put_set(self, set_id: int, ranks: Sequence[int] | None) -> None:
        """Leaves a process set; one to forget, where `ranks` is None."""
        with self._lock:
            self._sets.append((set_id, ranks))
            self._alarm.ring()

    def put_leaving(self, why: str) -> None:
        """Leaves the word that this rank leaves."""
        with self._lock:
            self._leaving = why
            self._alarm.ring()

    def put_wait(self, key: Key, *, gives_up: bool) -> None:
        """Leaves the word that the script has waited for an operation longer than a moment."""
        with self._lock:
            self._waits.append((key, gives_up))
            self._alarm.ring()

    # For the engine -----------------------------------------------------------------------------------------------------------------------

    def take(self, idle_s: float | None) -> tuple[Given, list[Arrival]]:
        """Sleeps until there is something to do, or for `idle_s`; takes it."""
        while True:
            with self._lock:
                given = self._take_given(time.monotonic())
                begins_cycle = self._due < math.inf
                pause_s = self._due - time.monotonic() if begins_cycle else idle_s
                self._alarm.set()
            arrivals = self._alarm.wait(0.0 if any(given) else pause_s)
            if any(given) or arrivals or not begins_cycle:
                return given, arrivals

    def find(self, key: Key) -> Entry | None:
        """The operation of this name that is under way."""
        return self._pending.get(key)

    def remove(self, entries: Iterable[Entry]) -> None:
        """Operations have been done."""
        with self._lock:
            for entry in entries:
                self._pending.pop(entry.key, None)

    def end(self, over: HorovodInternalError) -> list[Entry]:
        """Nothing is taken any more; what is under way."""
        with self._lock:
            self._over = self._over or over
            self._fresh, self._fresh_bytes = [], 0
            pending = list(self._pending.values())
            self._pending.clear()
            return pending

    def close(self) -> None:
        """Lets go of what wakes the engine."""
        with self._lock:
            self._alarm.close()

    def _take_given(self, now: float) -> Given:
        leaving, self._leaving = self._leaving, None
        sets, self._sets = self._sets, []
        waits, self._waits = self._waits, []
        fresh: list[Entry] = []
        if self._fresh and (now >= self._due or leaving is not None):
            fresh, self._fresh, self._fresh_bytes, self._due = self._fresh, [], 0, math.inf
        return Given(fresh, sets, leaving, waits)

    def _begin_cycle(self, now: float) -> None:
        """What was left is told after a cycle. Whoever gives one after the other is not interrupted: it begins anew with each, up to a limit."""
        due = now + self._cycle_s
        if self._due == math.inf:
            self._latest = now + max(_LONGEST_CYCLE_S, self._cycle_s)
            self._tell_by(due)
        elif self._due:
            self._due = min(max(self._due, due), self._latest)

    def _tell_by(self, due: float) -> None:
        if due < self._due:
            self._due = due
            self._alarm.ring()
