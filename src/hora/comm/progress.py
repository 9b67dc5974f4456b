"""How far each rank is, so that a collective that fails can say who is missing.

A rank counts its collectives as it begins and ends them, which costs two additions, and writes the counts into the job's store once a second
from a thread of its own. When a collective fails it looks, for a second or two, whose counts still move and where they stand, and at the
processes of its own host. Relies on all ranks making the same collectives in the same order; messages between two ranks do not count.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict

from torch import Tensor

from hora import events, pulse
from hora.comm.backends.queued import Mismatched
from hora.comm.deadline import Deadline
from hora.comm.diagnosis import Call, Condition, Picture, Status, condition, diagnose, is_lost_connection, is_timeout
from hora.comm.records import Record
from hora.comm.torch_private import Store
from hora.errors import CollectiveError, CollectiveMismatch, HoraError

BEAT_S = 1.0
_LOOK_S = 2.5 * BEAT_S
_POLL_S = 0.05
_LAST_WORD_S = 3.0
_LONGEST_REASON = 300


class Progress:
    """Counts the collectives of this rank, tells the others through `store`, and explains failures.

    Args:
        store: shared by the ranks of the session.
        records: who they are, by rank.
        rank: this one.
    """

    def __init__(self, store: Store, records: Sequence[Record], rank: int) -> None:
        self._store = store
        self._records = records
        self._rank = rank
        self._pid = os.getpid()
        self._beats = self._begun = self._finished = 0
        self._kind = self._reason = ""
        self.capturing = False
        self.awaited_by_others = False
        self._publishing = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hora-progress", daemon=True)
        if len(records) > 1:
            self._thread.start()

    def begin(self, kind: str, tensors: Sequence[Tensor], peer: int | None = None, among: tuple[int, ...] | None = None) -> Call:
        """Notes that a collective begins, of all ranks or `among` some, or a message to or from `peer`.

        Raises:
            HoraError: this process was forked from the rank's.
        """
        if os.getpid() != self._pid:
            raise HoraError(
                f"a process that is forked from a rank must make no collectives, but process {os.getpid()} was forked from {self._pid}, which "
                f"is rank {self._rank}; start ranks with hora run"
            )
        if peer is None and among is None:
            self._begun += 1
            self._kind = kind
            events.fault_point(f"collective.{self._begun}", rank=self._rank)
        pulse.mine().begin_call(kind, self._begun, self._begun if peer is None and among is None else 0)
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dtype = tensors[0].dtype if tensors else None
        events.observer().on_collective(kind=kind, sequence=self._begun, size_bytes=size_bytes, phase="begin")
        return Call(kind, self._begun, size_bytes, dtype, len(among or self._records), peer, time.monotonic(), among)

    def end(self, call: Call) -> None:
        """Notes that it has ended."""
        if call.is_numbered:
            self._finished = max(self._finished, call.sequence)
        pulse.mine().end_call(self._finished)
        events.observer().on_collective(kind=call.kind, sequence=call.sequence, size_bytes=call.size_bytes, phase="end")

    def step_aside(self) -> None:
        """Notes that this rank does something else while what it began goes on."""
        pulse.mine().end_call(self._finished)

    def await_end(self, call: Call) -> None:
        """Notes that this rank waits for what it began earlier."""
        pulse.mine().begin_call(call.kind, self._begun, call.sequence if call.is_numbered else 0)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Collectives inside the `with` block are not counted: they are captured into a graph, and not carried out."""
        before = self._begun, self._finished, self._kind
        self.capturing = True
        try:
            yield
        finally:
            self._begun, self._finished, self._kind = before
            self.capturing = False

    def explain(self, call: Call, error: Exception) -> CollectiveError:
        """The error to raise for the failure `error` of `call`: it says which ranks are missing, and what they last finished."""
        self.step_aside()
        text = str(error)
        if isinstance(error, Mismatched):
            return CollectiveMismatch(f"rank {self._rank} is in {call}: {text}")
        if not is_timeout(text) and not is_lost_connection(text):
            return CollectiveError(f"rank {self._rank} failed in {call}: {text}")
        waited_s = time.monotonic() - call.begun_s
        look = _Look(self._store, self._records, self._rank, self._publish)
        # A thread, because the store may be with a rank that is stopped, and then answers only after a long deadline of its own.
        thread = threading.Thread(target=look.run, name="hora-look", daemon=True)
        thread.start()
        thread.join(_LOOK_S + BEAT_S)
        return diagnose(call, self._rank, waited_s, look.pictures(), text)

    def leave_for(self, error: BaseException | None) -> None:
        """Notes the exception that drives this rank out, if one does, for `close` to tell."""
        self._reason = _say_exception(error)

    def all_leave(self, timeout_s: float) -> bool:
        """Whether all ranks come to this call, as the last thing before they leave, so that they may make further collectives.

        Waits for them. False as soon as one has left without, or is in a collective that this rank does not make, and so waits for it or trains on.
        """
        others, deadline = [record.rank for record in self._records if record.rank != self._rank], Deadline(timeout_s)
        if not others:
            return True
        self._store.set(_leaving_key(self._rank), "")
        while not deadline.passed:
            if self._store.check([_leaving_key(rank) for rank in others]):
                return True
            said = _read(self._store, others)
            if any(status.left or status.begun > self._begun for status in said.values()):
                return self._store.check([_leaving_key(rank) for rank in others])  # the last one may have gone on since
            time.sleep(_POLL_S)
        return False

    def close(self) -> None:
        """Says that this rank has left and ends the thread."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_WORD_S)

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it whom to tell
            while True:
                self._publish()
                if self._ending.wait(BEAT_S):
                    break
            self._publish(left=True)

    def _publish(self, *, left: bool = False) -> None:
        with self._publishing:
            self._beats += 1
            status = Status(self._beats, self._begun, self._finished, self._kind, left, self._reason if left else "")
            self._store.set(_key(self._rank), json.dumps(asdict(status)))


class _Look:
    """A look at all other ranks: what they last said, and whether they still speak."""

    def __init__(self, store: Store, records: Sequence[Record], rank: int, publish: Callable[[], None]) -> None:
        self._store = store
        self._mine = records[rank]
        self._others = [record for record in records if record.rank != rank]
        self._publish = publish
        self._conditions: dict[int, Condition] = {}
        self._see_processes()
        self._first: dict[int, Status] = {}
        self._last: dict[int, Status] = {}

    def run(self) -> None:
        """Looks until every rank that may still speak has spoken, or for a bounded time."""
        look = Deadline(_LOOK_S)
        # The others, when they fail as well, need to see that this rank is in its place.
        self._ask_store(self._publish)
        self._ask_store(self._read_first)
        while not look.passed:
            self._ask_store(self._read_last)
            # Again and again: the connections of a process that is killed break before it counts as dead.
            self._see_processes()
            if all(self._spoke(record.rank) or self._silent(record.rank) for record in self._others):
                break
            time.sleep(_POLL_S)

    def pictures(self) -> list[Picture]:
        """What was seen of each other rank."""
        return [
            Picture(record, self._last.get(record.rank), self._spoke(record.rank), self._conditions[record.rank]) for record in self._others
        ]

    def _ask_store(self, question: Callable[[], None]) -> None:
        """The rank that keeps the store may be the one that is gone."""
        with suppress(RuntimeError):
            question()

    def _read_first(self) -> None:
        self._first = self._read()

    def _read_last(self) -> None:
        self._last = self._read()

    def _see_processes(self) -> None:
        self._conditions = {record.rank: condition(record, self._mine) for record in self._others}

    def _spoke(self, rank: int) -> bool:
        return rank in self._last and (rank not in self._first or self._last[rank].beat > self._first[rank].beat)

    def _silent(self, rank: int) -> bool:
        left = rank in self._last and self._last[rank].left
        return left or self._conditions[rank] in (Condition.GONE, Condition.STOPPED)

    def _read(self) -> dict[int, Status]:
        return _read(self._store, [record.rank for record in self._others])


def _read(store: Store, ranks: Sequence[int]) -> dict[int, Status]:
    """What the ranks last said."""
    keys = {rank: _key(rank) for rank in ranks}
    return {rank: Status(**json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}


def _say_exception(error: BaseException | None) -> str:
    """The exception in one line."""
    if error is None or isinstance(error, SystemExit):
        return ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_LONGEST_REASON]}" if text else type(error).__name__


def _key(rank: int) -> str:
    return f"status/{rank}"


def _leaving_key(rank: int) -> str:
    return f"leaving/{rank}"
