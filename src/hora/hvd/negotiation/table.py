"""Who is ready for what: the operations that some ranks have announced and that have not begun. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hora.hvd.negotiation.mismatch import find_mismatch
from hora.hvd.negotiation.request import Key, Kind, Request

WORLD = 0
"""Process set of all ranks, the only one that a rank can leave early (`join`)."""


@dataclass(slots=True)
class Ready:
    """An operation for which all ranks of its process set are ready.

    Attributes:
        requests: what each rank has announced.
        request: what the first of them has; where nothing is wrong, others differ in no more than the rows of what is gathered.
        absent: ranks that have joined, and take part with zeros.
        error: why it cannot be done; None: it can.
        last_joined: of a JOIN, the rank that came last.
        number: with which all ranks have told it, who thereby agree; None where one has told it in full.
    """

    requests: dict[int, Request]
    absent: tuple[int, ...] = ()
    error: str | None = None
    last_joined: int = -1
    number: int | None = None
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        self.request = next(iter(self.requests.values()))


@dataclass
class Waiting:
    """An operation for which ranks are missing."""

    since: float
    number: int | None = None
    requests: dict[int, Request] = field(default_factory=dict)
    warned: bool = False


class Table:
    """The operations that are waited for.

    Args:
        world: all ranks.
    """

    def __init__(self, world: Sequence[int]) -> None:
        self._sets: dict[int, tuple[int, ...]] = {WORLD: tuple(world)}
        self._waiting: dict[Key, Waiting] = {}
        self._complete: dict[Key, None] = {}
        self._joined: dict[int, Request] = {}

    def register(self, set_id: int, ranks: Sequence[int]) -> None:
        """Makes a process set known; ranks may have announced operations of it already."""
        self._sets[set_id] = tuple(ranks)
        self._look_again()

    def unregister(self, set_id: int) -> None:
        """Forgets a process set and what was announced of it."""
        del self._sets[set_id]
        for key in [key for key in self._waiting if key[0] == set_id]:
            del self._waiting[key]
            self._complete.pop(key, None)

    def ranks_of(self, set_id: int) -> tuple[int, ...]:
        """Ranks of a process set."""
        return self._sets[set_id]

    def add(self, rank: int, request: Request, now: float, number: int | None = None) -> None:
        """`rank` is ready for an operation, which it has told with `number`, or in full."""
        if request.kind is Kind.JOIN:
            self._joined[rank] = request
            self._look_again()
            return
        key = request.key
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = Waiting(now, number)
        elif waiting.number != number:
            waiting.number = None
        waiting.requests[rank] = request
        if self._joined:
            self._look_at(key, waiting)
        elif len(waiting.requests) == len(self._sets.get(key[0], ())):  # as it says, without the call: this is done for each name
            self._complete[key] = None

    def take_ready(self) -> list[Ready]:
        """What can begin, in the order in which it became ready; it is waited for no more."""
        ready = [self._judge(self._waiting.pop(key)) for key in self._complete]
        self._complete.clear()
        if self._joined and len(self._joined) == len(self._sets[WORLD]):
            joined, self._joined = self._joined, {}
            ready.append(Ready(joined, last_joined=next(reversed(joined))))
        return ready

    def waiting(self) -> Iterator[tuple[Key, Waiting, tuple[int, ...]]]:
        """What ranks are missing for, and which ones."""
        for key, waiting in self._waiting.items():
            members = self._sets.get(key[0], ())
            yield key, waiting, tuple(rank for rank in members if rank not in waiting.requests and not self._is_absent(rank, key[0]))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is waited for."""
        return not self._waiting

    def _is_absent(self, rank: int, set_id: int) -> bool:
        return set_id == WORLD and rank in self._joined

    def _look_again(self) -> None:
        for key, waiting in self._waiting.items():
            self._look_at(key, waiting)

    def _look_at(self, key: Key, waiting: Waiting) -> None:
        members = self._sets.get(key[0])
        if members is None or len(waiting.requests) + len(self._joined) < len(members):
            return
        if len(waiting.requests) == len(members):
            self._complete[key] = None
            return
        if all(rank in waiting.requests or self._is_absent(rank, key[0]) for rank in members):
            self._complete[key] = None

    def _judge(self, waiting: Waiting) -> Ready:
        requests = waiting.requests
        first = next(iter(requests.values()))
        if waiting.number is not None and len(requests) == len(self._sets[first.set_id]):
            return Ready(requests, number=waiting.number)
        absent = tuple(rank for rank in self._sets[first.set_id] if rank not in requests)
        error = find_mismatch(requests)
        if error is None and absent and first.kind is not Kind.ALLREDUCE:
            error = f"{first.kind.capitalize()} is not supported with Join at this time. Tensor {first.name!r}; joined: {list(absent)}."
        return Ready(requests, absent, error)
