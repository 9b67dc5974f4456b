"""Process sets: some of the ranks, for operations that the others do not take part in."""

from collections.abc import Iterable, Sequence
from typing import Any

import hora
from hora.errors import ConfigError
from hora.hvd import state
from hora.hvd.exceptions import WrongType, brief


class ProcessSet:
    """Some of the ranks; it can be used once `init(process_sets=...)` or `add_process_set` has made it known.

    Args:
        ranks_or_comm: the ranks; or a communicator of mpi4py, whose ranks they are, and which may be another one on other ranks (`Split`).

    Attributes:
        process_set_id: its number; None until it is known.
        mpi_comm: the communicator, if it was made from one.

    Raises:
        ConfigError: `ranks_or_comm` is neither.
    """

    process_set_id: int | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self._ranks: list[int] | None
        if ranks_or_comm is None:
            self._ranks = None
        elif isinstance(ranks_or_comm, Iterable):
            self._ranks = sorted(set(ranks_or_comm))
        else:
            self._ranks = sorted(_world_ranks(ranks_or_comm))
            self.mpi_comm = ranks_or_comm

    @property
    def ranks(self) -> list[int] | None:
        """Its ranks; None of the global set before `init`."""
        if self._ranks is None:
            return list(range(state.current().session.world_size)) if state.is_running() else None
        return list(self._ranks)

    def size(self) -> int:
        """How many ranks it has."""
        return len(self._known())

    def rank(self) -> int:
        """This rank's place in it; -1 where it has none."""
        ranks, mine = self._known(), state.current().session.rank
        return ranks.index(mine) if mine in ranks else -1

    def included(self) -> bool:
        """Whether this rank is in it, known or not."""
        return state.current().session.rank in (self.ranks or ())

    def _known(self) -> list[int]:
        if self.process_set_id is None:
            raise ConfigError(f"{self} has not been registered; pass it to hvd.init(process_sets=...) or to hvd.add_process_set")
        ranks = self.ranks
        if ranks is None:
            raise ConfigError(state.NOT_INITIALIZED)
        return ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self.process_set_id == other.process_set_id and self.ranks == other.ranks

    __hash__ = object.__hash__


global_process_set = ProcessSet(None)
global_process_set.process_set_id = 0


@brief
def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a process set known, in a world that was initialised for that (`init(process_sets="dynamic")` or HOROVOD_DYNAMIC_PROCESS_SETS=1).

    Collective: all ranks call it, in one order, with the same ranks, also those that are not among them.

    Raises:
        ValueError: the world does not allow it, or there is such a set already.
        ConfigError: there is no such rank.
    """
    here = state.current()
    if not here.dynamic:
        raise ConfigError(
            "process sets can be added only where HOROVOD_DYNAMIC_PROCESS_SETS=1 is set, or after hvd.init(process_sets='dynamic')"
        )
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    register(added)
    return added


@brief
def remove_process_set(process_set: ProcessSet) -> bool:
    """Forgets a process set; False where it is not known, or is the global one.

    Collective: all ranks call it, when nothing of the set is under way.
    """
    here = state.current()
    set_id = process_set.process_set_id
    if not set_id or set_id not in here.sets:
        return False
    here.barrier()
    here.engine.unregister(set_id)
    del here.sets[set_id]
    process_set.process_set_id = None
    return True


def require_set(process_set: object) -> None:
    """Refuses what is no process set.

    Raises:
        WrongType: says what was given.
    """
    if not isinstance(process_set, ProcessSet):
        raise WrongType(
            f"process_set must be a ProcessSet, but is a {type(process_set).__name__} instead: {str(process_set)[:60]}; make one with hvd.ProcessSet"
        )


def register(process_set: ProcessSet) -> None:
    """Makes `process_set` known to the engine, under the next number; where ranks have communicators that differ, all of these.

    Collective.

    Raises:
        ValueError: one with these ranks is known.
    """
    mine = process_set.ranks
    assert mine is not None
    told = [mine] if process_set.mpi_comm is None else hora.all_gather_object(mine)
    for ranks in sorted(set(map(tuple, told))):
        register_one(process_set if list(ranks) == mine else ProcessSet(ranks))


def register_one(process_set: ProcessSet) -> None:
    """As `register`, of a set that has the same ranks on all of them."""
    here, ranks = state.current(), process_set.ranks
    assert ranks is not None
    for known in here.sets.values():
        if known.ranks == ranks:
            raise ConfigError(f"A process set with ranks {ranks} has been registered already: {known}")
    group = here.group_of(tuple(ranks))
    process_set.process_set_id = here.next_set_id()
    here.sets[process_set.process_set_id] = process_set
    here.engine.register(process_set.process_set_id, group)
    here.barrier()  # nobody uses it before rank 0 knows it


def _world_ranks(communicator: Any) -> list[int]:
    """The ranks of a communicator of mpi4py, in the world of MPI."""
    if not hasattr(communicator, "Get_group"):
        raise ConfigError(f"ProcessSet takes ranks or a communicator of mpi4py, but got {type(communicator).__name__}")
    from mpi4py import MPI

    group = communicator.Get_group()
    return [int(rank) for rank in group.Translate_ranks(range(group.Get_size()), MPI.COMM_WORLD.Get_group())]
