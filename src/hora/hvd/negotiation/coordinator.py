"""What rank 0 decides: it hears all ranks, finds what all are ready for, and tells everybody in one order. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hora.hvd.negotiation.fusion import plan_fusion
from hora.hvd.negotiation.message import Announcement, Batch, Decision
from hora.hvd.negotiation.request import Key, Kind, Request
from hora.hvd.negotiation.table import WORLD, Ready, Table
from hora.hvd.negotiation.vocabulary import Dictionary


@dataclass(frozen=True)
class Tuning:
    """What can be set.

    Attributes:
        fusion_bytes: how much travels together at most.
        cycle_s: how long a rank gathers what it becomes ready for before it tells.
        cache_capacity: how many operations have numbers.
        stall_warn_s: after how long ranks that are missing are named; None: never.
        stall_end_s: after how long all is ended; None: never.
    """

    fusion_bytes: int = 128 * 2**20
    cycle_s: float = 0.001
    cache_capacity: int = 1024
    stall_warn_s: float | None = 60.0
    stall_end_s: float | None = None


class Stalled(NamedTuple):
    """An operation that has been waited for too long."""

    key: Key
    kind: Kind
    waited_s: float
    ready: tuple[int, ...]
    missing: tuple[int, ...]


class Coordinator:
    """The negotiation of one world.

    Args:
        world_size: number of ranks.
        tuning: see there.
    """

    def __init__(self, world_size: int, tuning: Tuning) -> None:
        self._world = range(world_size)
        self._tuning = tuning
        self._table = Table(self._world)
        self._dictionary = Dictionary(tuning.cache_capacity)
        self._serials = dict.fromkeys(self._world, 0)
        self._waits: dict[int, tuple[Key, bool]] = {}
        self._end: str | None = None
        self._told_end = False

    @property
    def table(self) -> Table:
        """What is waited for."""
        return self._table

    @property
    def numbered(self) -> int:
        """How many operations have numbers."""
        return len(self._dictionary)

    def hear(self, rank: int, said: Announcement, now: float) -> list[Request]:
        """Takes what `rank` has announced, at time `now` in seconds; what that is in full."""
        known = [self._dictionary.look_up(number, rank) for number in said.numbers]
        for number, request in zip(said.numbers, known, strict=True):
            self._table.add(rank, request, now, number)
        for request in said.requests:
            self._table.add(rank, request, now)
        for key, gives_up in said.waits:
            self._waits[rank] = key, gives_up
        self._dictionary.heard(rank, said.heard)
        if said.leaving is not None:
            self.end(said.leaving)
        return known + said.requests

    def end(self, why: str) -> None:
        """Ends everything with the next decision; the first reason counts."""
        self._end = self._end or why

    def decide(self) -> tuple[list[Ready], dict[int, Decision]]:
        """What begins now, and what each rank is told of it: nothing where there is nothing new for it."""
        if self._told_end:
            return [], {}
        ready = self._table.take_ready()
        decisions = {rank: Decision() for rank in self._world}
        for batch in plan_fusion(ready, self._tuning.fusion_bytes):
            told = self._describe(batch)
            for rank in self._table.ranks_of(batch[0].request.set_id):
                decisions[rank].batches.append(told)
        for one in ready:
            if one.number is not None:
                self._dictionary.use(one.number, one.request.key)
            elif one.error is None and not one.absent and one.request.kind not in (Kind.JOIN, Kind.BARRIER):
                self._dictionary.note(one.requests)
        self._add_news(decisions)
        if self._waits:
            self._release(ready, decisions)
        if self._end is not None and not self._told_end:
            self._told_end = True
            for decision in decisions.values():
                decision.end = self._end
        return ready, {rank: self._number(rank, one) for rank, one in decisions.items() if _says_something(one)}

    def stalled(self, now: float) -> list[Stalled]:
        """What has been waited for too long, each told once."""
        after_s, found = self._tuning.stall_warn_s, []
        if after_s is None:
            return []
        for key, waiting, missing in self._table.waiting():
            if not waiting.warned and now - waiting.since >= after_s:
                waiting.warned = True
                kind = next(iter(waiting.requests.values())).kind
                found.append(Stalled(key, kind, now - waiting.since, tuple(sorted(waiting.requests)), missing))
        return found

    def overdue(self, now: float) -> list[Stalled]:
        """What is waited for when one operation has been for so long that all is to end; also what others wait for, once it is worth a warning."""
        end_s, warn_s = self._tuning.stall_end_s, self._tuning.stall_warn_s
        if end_s is None or not self.awaited(now, end_s):
            return []
        return self.awaited(now, end_s if warn_s is None else min(warn_s, end_s))

    def awaited(self, now: float, after_s: float) -> list[Stalled]:
        """What has been waited for `after_s` or longer."""
        return [
            Stalled(key, next(iter(waiting.requests.values())).kind, now - waiting.since, tuple(sorted(waiting.requests)), missing)
            for key, waiting, missing in self._table.waiting()
            if now - waiting.since >= after_s
        ]

    def _describe(self, batch: Sequence[Ready]) -> Batch:
        first = batch[0]
        if first.request.kind is Kind.JOIN:
            return Batch((first.request.key,), last_joined=first.last_joined)
        entries = tuple(self._name(one) for one in batch)
        rows = {tuple(part.shape for part in request.parts) for request in first.requests.values()}
        full = tuple(one.request for one in batch) if first.absent else ()
        return Batch(entries if not full else tuple(one.request.key for one in batch), first.error, len(rows) == 1, full)

    def _name(self, one: Ready) -> int | Key:
        """What stands for an operation: its number, if every rank will still know it."""
        number = self._dictionary.number(one.requests) if one.number is None else one.number
        return number if number is not None and self._dictionary.is_in_use(number, one.request.key) else one.request.key

    def _release(self, ready: Sequence[Ready], decisions: dict[int, Decision]) -> None:
        """Frees ranks that wait, and need not, for ranks that wait for them."""
        begun = {one.request.key for one in ready}
        self._waits = {rank: (key, gives_up) for rank, (key, gives_up) in self._waits.items() if key not in begun}
        missing = {key: ranks for key, _, ranks in self._table.waiting()}
        stuck = {rank: missing.get(key, ()) for rank, (key, _) in self._waits.items()}
        for rank, (key, gives_up) in list(self._waits.items()):
            if gives_up and any(rank in stuck.get(other, ()) for other in missing.get(key, ())):
                decisions[rank].release.append(key)
                del self._waits[rank]

    def _add_news(self, decisions: dict[int, Decision]) -> None:
        news = self._dictionary.take_news()
        for number, key in news.learn:
            for rank in self._table.ranks_of(key[0]):
                decisions[rank].learn.append((number, key))
        if news.forget:
            for decision in decisions.values():
                decision.forget = list(news.forget)
            self._dictionary.told(news.forget, {rank: serial + 1 for rank, serial in self._serials.items()})

    def _number(self, rank: int, decision: Decision) -> Decision:
        self._serials[rank] += 1
        decision.serial = self._serials[rank]
        return decision


def _says_something(decision: Decision) -> bool:
    return bool(decision.batches or decision.learn or decision.forget or decision.release or decision.end is not None)


__all__ = ["WORLD", "Coordinator", "Stalled", "Tuning"]
