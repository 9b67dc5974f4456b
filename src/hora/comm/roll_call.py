"""Before a call all ranks say what they are about to do: numbers of one fixed size, from every host to every host, before any payload moves.

Ranks that are about to do different things learn it here, all of them, with names; without it Gloo adds up what does not belong together or aborts
the process, and NCCL hangs. The message goes between the hosts (on GPUs too, where it costs the device nothing), so its size fits whatever
the call is. Figures that every rank must know in every step (weights, flags) ride along.
"""

import inspect
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hora.comm.backends.queued import PostedCall
from hora.comm.deadline import Deadline
from hora.comm.diagnosis import Call
from hora.comm.progress import Progress
from hora.comm.records import say_ranks
from hora.comm.torch_private import AllgatherOptions, Store
from hora.errors import CollectiveError, CollectiveMismatch, ConfigError

_AT_ONCE, _LATER = AllgatherOptions(), AllgatherOptions()
_AT_ONCE.asyncOp = False
_EXPLAIN_S = 10.0
_POLL_S = 0.02


class RollCall:
    """The messages of one session.

    Args:
        group: over which the hosts talk; None in a world of one.
        store: where ranks that disagree tell each other the details.
        progress: explains why a rank does not answer.
        rank: this one.
        world_size: number of ranks.
        num_numbers: figures that each message has room for.
        ranks: what the ranks are called in errors; by default their numbers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        store: Store,
        progress: Progress,
        rank: int,
        world_size: int,
        num_numbers: int,
        ranks: Sequence[int] | None = None,
    ):
        self._ranks = range(world_size) if ranks is None else ranks
        self._group = group
        self._store = store
        self._progress = progress
        self._rank = rank
        self._world_size = world_size
        self._length = 1 + num_numbers
        self._count = 0

    def begin(self, what: str, call: Call, *, numbers: Sequence[float] = (), details: str | None = None, waits: bool = False) -> "Answers":
        """Says that this rank is about to do `what`; returns at once.

        Collective: all ranks call it in one order.

        Args:
            what: the same on all ranks if they do the same.
            call: what it is to `Progress`.
            numbers: of this rank, for all.
            details: what is said of it if others do something else; by default `what`.
            waits: the caller waits for the answers now, so that a group need not hand the message to a thread.
        """
        assert len(numbers) < self._length
        if self._progress.capturing:
            raise ConfigError(f"ranks cannot agree on {what} while a step is captured into a CUDA graph")
        if self._progress.awaited_by_others:
            raise ConfigError(
                f"ranks cannot agree on {what} inside rank_zero_first, where the others wait until this one is done; do what all ranks do together, "
                "such as making a loader, after the block"
            )
        self._count += 1
        rest = [0.0] * (self._length - 1 - len(numbers))
        mine = torch.tensor([float(zlib.crc32(what.encode())), *numbers, *rest], dtype=torch.float64, device="cpu")
        if self._group is None:
            return Answers(self, [mine], None, call, what, self._count)
        said = [torch.empty_like(mine) for _ in range(self._world_size)]
        try:
            # In memory nothing need be handed to a thread in any case, and who waits hears signals.
            post = getattr(self._group, "post_all_gather", None)
            work = None if post is None else post(said, mine)
            if work is None:
                # The group's own method: what torch.distributed puts around it takes longer than the message.
                work = self._group.allgather([said], [mine], _AT_ONCE if waits else _LATER)
        except RuntimeError as error:
            raise self._progress.explain(call, error) from error
        return Answers(self, said, work, call, details or what, self._count, mine)

    @property
    def backend(self) -> str:
        """Of the group over which the hosts talk."""
        return str(dist.get_backend(self._group))

    def close(self) -> None:
        """Lets go of the group, which ends when nobody holds it; who still holds answers holds this."""
        self._group = None

    def refuse(self, details: str, number: int, said: Sequence[float]) -> CollectiveMismatch:
        """The error for ranks that said different things at roll call `number`; each has left its details in the store."""
        self._store.set(_key(number, self._rank), details + _place_in_script())
        told = self._read_details(number)
        groups: dict[float, list[int]] = {}
        for rank, ticket in enumerate(said):
            groups.setdefault(ticket, []).append(rank)
        clauses = [
            f"{say_ranks([self._ranks[rank] for rank in ranks])} {_verb(ranks)} about to {_say_details(told, ranks)}"
            for ranks in groups.values()
        ]
        return CollectiveMismatch(f"all ranks must make the same calls in the same order, but {'; '.join(clauses)}")

    def _read_details(self, number: int) -> dict[int, str]:
        told: dict[int, str] = {}
        deadline = Deadline(_EXPLAIN_S)
        while len(told) < self._world_size and not deadline.passed:
            for rank in set(range(self._world_size)) - set(told):
                if self._store.check([_key(number, rank)]):
                    told[rank] = self._store.get(_key(number, rank)).decode(errors="replace")
            time.sleep(_POLL_S)
        return told

    def explain(self, call: Call, error: RuntimeError) -> CollectiveError:
        """The error for ranks that do not answer."""
        return self._progress.explain(call, error)


@dataclass
class Answers:
    """What all ranks have said, or will have. `_kept` is what this one said: its memory must live until it has been read."""

    _roll_call: RollCall
    _said: list[Tensor]
    _work: dist.Work | PostedCall | None
    _call: Call
    _details: str
    _number: int
    _kept: Tensor | None = None

    def wait(self) -> list[list[float]]:
        """The numbers of each rank; again returns them again.

        Raises:
            CollectiveMismatch: ranks are about to do different things; on every rank alike, with names.
            CollectiveTimeout, PeerLost: a rank did not answer.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._roll_call.explain(self._call, error) from error
            self._work = None
            tickets = [float(said[0]) for said in self._said]
            if any(ticket != tickets[0] for ticket in tickets):
                raise self._roll_call.refuse(self._details, self._number, tickets)
        return [said.tolist()[1:] for said in self._said]


def _place_in_script() -> str:
    """Where the nearest code that is neither Hora's nor torch's is; nothing in a thread of autograd's own, as of a plain backward on a GPU."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("hora", "torch"):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def _key(number: int, rank: int) -> str:
    return f"call/{number}/{rank}"


def _verb(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _say_details(told: dict[int, str], ranks: Sequence[int]) -> str:
    """What the ranks of one group were about to do; they said the same, so that one's details will do."""
    return next((told[rank] for rank in ranks if rank in told), "do something else (it left no word)")
