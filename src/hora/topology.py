"""Where this process stands among the processes of its job.

Read once from the environment that Hora's launcher, torchrun, Slurm, Open MPI or MPICH leaves; a process that finds none is alone. Relies on
the standard library alone, opens nothing.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hora import env
from hora.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Place of one rank. All indices begin at 0; `source` says whose variables were read."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    source: str = "alone"

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be from 0 to {size_name} - 1 = {size - 1}, but is {value} instead"
            for name, value, size_name, size in (
                ("rank", self.rank, "world_size", self.world_size),
                ("local_rank", self.local_rank, "local_world_size", self.local_world_size),
                ("node_rank", self.node_rank, "num_nodes", self.num_nodes),
            )
            if not 0 <= value < size
        ]
        if self.local_world_size > self.world_size:
            problems.append(f"local_world_size = {self.local_world_size} must not exceed world_size = {self.world_size}")
        if problems:
            raise ConfigError(f"the place of this process (from {self.source}) is impossible: " + "; ".join(problems))

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.world_size == 1

    @property
    def started_by_hand(self) -> bool:
        """Whether no launcher that is known here has started this process, which would see to it that the other ranks come, or end this one."""
        return not self.alone and (self.source not in _SCHEMES or self.source == "env")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Topology":
        """Reads the place of this process.

        Looks for Hora's launcher, torchrun, Slurm (inside `srun` only), Open MPI and MPICH, in this order; a bare `RANK` with `WORLD_SIZE`
        counts as `env`.

        Raises:
            ConfigError: a variable is missing, is no integer, or contradicts another; all are named.
        """
        for source, scheme in _SCHEMES.items():
            if scheme.marker in environ:
                return scheme.read(source, environ)
        return cls()


def knows_local_rank(source: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher `source` said which rank of its node this process is; else it was guessed as if nodes were alike."""
    return source in _SCHEMES and _SCHEMES[source].local_rank in environ


def knows_node_rank(source: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher `source` said which node this is; else it was guessed as if nodes were alike and filled one after the other."""
    return source in _SCHEMES and (_SCHEMES[source].node_rank or "") in environ


@dataclass(frozen=True)
class _Scheme:
    """Names of the variables of one launcher; the first one that is set counts. `marker` tells that the launcher was at work."""

    marker: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node_rank: str | None = None
    num_nodes: str | None = None

    def read(self, source: str, environ: Mapping[str, str]) -> Topology:
        problems: list[str] = []

        def number(name: str | None, default: int | None) -> int:
            text = None if name is None else environ.get(name)
            if text is None:
                if default is None:
                    problems.append(f"{name} is not set")
                return default or 0
            if _NUMBER.fullmatch(text):
                return int(text)
            if _COUNTS.fullmatch(text):
                node = environ.get(self.node_rank or "", "")
                return _count_of(text, int(node) if _NUMBER.fullmatch(node) else 0)
            problems.append(f"{name} must be an integer from 0, but is {text!r} instead")
            return default or 0

        rank, world_size = number(self.rank, None), number(self.world_size, None)
        local_world_size = number(self.local_world_size, world_size or 1)
        local_rank = number(self.local_rank, rank % local_world_size if local_world_size else 0)
        nodes_by_size = -(-world_size // local_world_size) if local_world_size else 1
        num_nodes = number(self.num_nodes, nodes_by_size)
        node_rank = number(self.node_rank, rank // local_world_size if local_world_size else 0)
        if problems:
            raise ConfigError(
                f"the environment of {source} is incomplete: " + "; ".join(problems) + "; start with `hora run`, or unset "
                f"{self.marker} to run alone"
            )
        return Topology(rank, world_size, local_rank, local_world_size, node_rank, num_nodes, source)


_NUMBER = re.compile(r"[0-9]{1,18}")
# As Slurm writes SLURM_STEP_TASKS_PER_NODE: 4 ranks on each of the first two nodes, then 3.
_COUNTS = re.compile(r"[0-9]{1,9}(\(x[0-9]{1,9}\))?(,[0-9]{1,9}(\(x[0-9]{1,9}\))?)*")


def _count_of(text: str, node_rank: int) -> int:
    """What is counted on a node, in a text such as `4(x2),3`; the last count of one that is too short."""
    end, count = 0, 0
    for part in text.split(","):
        number, _, times = part.rstrip(")").partition("(x")
        count, end = int(number), end + int(times or 1)
        if node_rank < end:
            break
    return count


_SCHEMES = {
    "hora": _Scheme(env.RENDEZVOUS, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", env.NODE_RANK, env.NUM_NODES),
    "torchrun": _Scheme("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    "env": _Scheme("RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "slurm": _Scheme(
        "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
    ),
    "openmpi": _Scheme(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": _Scheme("PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip
