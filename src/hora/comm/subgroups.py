"""Collectives among some of the ranks.

A subgroup has connections, a roll call and deadlines of its own. Its calls have no number among the collectives of the session, for the others do not
make them; so what is said of one that fails is who of its members is gone, stopped or silent, and not how far each has come.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hora.comm.diagnosis import Call
from hora.comm.groups import Groups
from hora.comm.progress import Progress
from hora.comm.roll_call import RollCall
from hora.comm.session import Session, session
from hora.comm.torch_private import PrefixStore
from hora.errors import CollectiveError, ConfigError
from hora.plan.nodes import Nodes


@dataclass(frozen=True)
class _Among:
    """The progress of calls that only `ranks` make."""

    progress: Progress
    ranks: tuple[int, ...]

    def begin(self, kind: str, tensors: Sequence[Tensor], peer: int | None = None) -> Call:
        return self.progress.begin(kind, tensors, None if peer is None else self.ranks[peer], self.ranks)

    def end(self, call: Call) -> None:
        self.progress.end(call)

    def step_aside(self) -> None:
        self.progress.step_aside()

    def await_end(self, call: Call) -> None:
        self.progress.await_end(call)

    def explain(self, call: Call, error: Exception) -> CollectiveError:
        return self.progress.explain(call, error)


@dataclass(frozen=True, eq=False)
class Subgroup:
    """Some ranks of the session, as `new_group` makes them. On ranks that are not among them it can be asked, and not be used.

    Attributes:
        ranks: of the session, in ascending order.
        rank: index of this process in the group; -1 if it is not in it.
        device: where its tensors live.
        check_calls: whether they agree on each collective before its data moves.
        session: in which it was made, and with which it ends.
    """

    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    check_calls: bool
    session: Session = field(repr=False)
    _parts: "tuple[Groups, _Among, RollCall] | None" = field(repr=False)

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return len(self.ranks)

    @property
    def is_member(self) -> bool:
        """Whether this process is in it."""
        return self.rank >= 0

    @property
    def groups(self) -> Groups:
        """In which algorithms talk."""
        return self.require_member()[0]

    @property
    def progress(self) -> _Among:
        """Counts its collectives and explains failures."""
        return self.require_member()[1]

    @property
    def roll_call(self) -> RollCall:
        """Has its ranks say what they are about to do."""
        return self.require_member()[2]

    def require_member(self) -> "tuple[Groups, _Among, RollCall]":
        """What only its members have.

        Raises:
            ConfigError: this process is none.
        """
        if self._parts is None:
            raise ConfigError(f"only ranks {list(self.ranks)} can use this group, but this is rank {session().rank}; ask is_member first")
        return self._parts


def new_group(ranks: Sequence[int]) -> Subgroup:
    """A group of some of the ranks, for the argument `group` of collectives; it lasts as long as the session.

    Collective: all ranks of the session call it, in the same order, with the same `ranks`, also those that are not among them.

    Args:
        ranks: of the session, each once; in the group they are numbered in ascending order.

    Raises:
        ConfigError: there is no such rank, or one comes twice, or there is none.
        CollectiveMismatch: ranks call it with different `ranks`.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = session()
    wanted = tuple(sorted(ranks))  # torch.distributed numbers them so
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(here.world_size)):
        raise ConfigError(f"ranks must be some of 0 to {here.world_size - 1}, each once, but are {list(ranks)} instead")
    call = here.progress.begin("new_group", [])
    if here.world_size > 1:
        here.roll_call.begin(f"new_group of ranks {list(wanted)}", call, waits=True).wait()
    try:
        made = _make(wanted, here)
    except RuntimeError as error:
        raise here.progress.explain(call, error) from error
    here.progress.end(call)
    return made


def _make(wanted: tuple[int, ...], here: Session) -> Subgroup:
    rank = wanted.index(here.rank) if here.rank in wanted else -1
    number, timeout = next(here.plans), timedelta(seconds=here.timeout_s)
    backends = [here.backend] if here.device.type == "cpu" else [here.backend, here.roll_call.backend]
    made = [dist.new_group(list(wanted), backend=backend, timeout=timeout) for backend in backends] if here.world_size > 1 else [here.group]
    if rank < 0:
        return Subgroup(wanted, rank, here.device, here.check_calls, here, None)
    # Which of their nodes are one is not looked at: `hierarchical` would have to make groups that others take part in.
    groups = Groups(made[0], Nodes.of([0] * len(wanted)), here.timeout_s, here.groups.table)
    store = PrefixStore(f"subgroup/{number}", here.store)
    among = _Among(here.progress, wanted)
    roll_call = RollCall(made[-1] if len(wanted) > 1 else None, store, here.progress, rank, len(wanted), 0, ranks=wanted)
    if here.world_size > 1:
        for group in made:
            here.release.callback(_end, group)
    here.release.enter_context(closing(groups))
    here.release.enter_context(closing(roll_call))
    return Subgroup(wanted, rank, here.device, here.check_calls, here, (groups, among, roll_call))


def _end(group: dist.ProcessGroup) -> None:
    if dist.is_initialized():
        dist.destroy_process_group(group)
