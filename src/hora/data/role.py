"""For whom a loader deals: which logical ranks this process plays.

Found in the session, or said by the caller, to look at what another rank would get.
"""

from dataclasses import dataclass

from hora.comm import session
from hora.errors import ConfigError
from hora.plan.logical import LogicalRanks
from hora.topology import Topology


@dataclass(frozen=True)
class Role:
    """The part of one rank in the dealing of global batches.

    Attributes:
        rank: index of the rank.
        logical_ranks: to whom each global batch is dealt, and who plays them.
        in_job: whether the other ranks are there to be asked.
    """

    rank: int
    logical_ranks: LogicalRanks
    in_job: bool

    @classmethod
    def find(cls, rank: int | None, world_size: int | None, logical_ranks: int | None) -> "Role":
        """The role of `rank` of `world_size`; by default this process's in the session. One logical rank each unless
        `logical_ranks` is given or the session is exact.

        Raises:
            ConfigError: only one of `rank` and `world_size` is given, they contradict each other, or `hora.init` was not called although this
                process was started with others.
        """
        if (rank is None) != (world_size is None):
            raise ConfigError(f"rank and world_size must be given together, but are {rank} and {world_size} instead")
        in_job = rank is None and session.is_initialized()
        if rank is None or world_size is None:
            topology = _topology()
            rank, world_size = topology.rank, topology.world_size
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, but is {rank} instead")
        if logical_ranks is None:
            exact = session.session().exact if session.is_initialized() else None
            logical_ranks = exact.logical_ranks if exact else world_size
        return cls(rank, LogicalRanks(logical_ranks, world_size), in_job)

    @property
    def prefix(self) -> str:
        """How errors name this rank."""
        return f"rank {self.rank} of {self.logical_ranks.world_size}"


def _topology() -> Topology:
    if session.is_initialized():
        return session.session().topology
    topology = Topology.from_env()
    if not topology.alone:
        raise ConfigError(
            f"this process is rank {topology.rank} of {topology.world_size} (says {topology.source}), so hora.init() must be called before a "
            "loader is made: without it each rank would train on everything"
        )
    return topology
