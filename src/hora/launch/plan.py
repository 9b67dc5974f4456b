"""Who runs on this node, with which command and which environment. Pure: reads no file, starts nothing.

Ranks are numbered node by node.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hora import env
from hora.errors import ConfigError
from hora.launch import horovod_words
from hora.launch.options import LaunchOptions


def count_ranks(options: LaunchOptions, *, cores: int, gpus: int) -> int:
    """How many ranks this node runs, on a node with so many cores and GPUs.

    Raises:
        ConfigError: the number is none, is 0, cannot be dealt to the nodes, or `-np` and `--nproc-per-node` contradict each other.
    """
    if options.nproc is None:
        return per_node(options.nproc_per_node or "1", cores, gpus)
    share, rest = divmod(options.nproc, options.num_nodes)
    if rest:
        raise ConfigError(
            f"-np {options.nproc} counts the ranks of all nodes and must be a multiple of --nnodes {options.num_nodes}; "
            "or say --nproc-per-node instead"
        )
    if options.nproc_per_node is not None and per_node(options.nproc_per_node, cores, gpus) != share:
        raise ConfigError(
            f"-np {options.nproc} on {options.num_nodes} nodes is {share} a node, but --nproc-per-node is {options.nproc_per_node}; give one of them"
        )
    return share


def per_node(text: str, cores: int, gpus: int) -> int:
    """How many ranks a node runs that has so many cores and GPUs, in the words of `--nproc-per-node`.

    Raises:
        ConfigError: the number is none, or is 0.
    """
    if text == "gpu" and not gpus:
        raise ConfigError("--nproc-per-node gpu needs a GPU, but none is visible on this node; give a number, or `cpu`")
    counted = {"auto": gpus or cores, "gpu": gpus, "cpu": cores}
    if text in counted:
        return counted[text]
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise ConfigError(f"--nproc-per-node must be a number from 1, `auto`, `cpu` or `gpu`, but is {text!r} instead")
    return int(text)


@dataclass(frozen=True)
class Layout:
    """How many ranks each launcher of the job runs, and which of them this is. A launcher without ranks, which must be the last, is no node."""

    ranks_of_nodes: tuple[int, ...]
    node_rank: int

    @classmethod
    def even(cls, num_nodes: int, node_rank: int, ranks_per_node: int) -> "Layout":
        """Nodes that all run as many ranks."""
        return cls((ranks_per_node,) * num_nodes, node_rank)

    @property
    def num_launchers(self) -> int:
        """Launchers that take part, with ranks or without."""
        return len(self.ranks_of_nodes)

    @property
    def num_nodes(self) -> int:
        """Nodes that run ranks."""
        return sum(map(bool, self.ranks_of_nodes))

    @property
    def ranks_per_node(self) -> int:
        """How many ranks this node runs."""
        return self.ranks_of_nodes[self.node_rank]

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return sum(self.ranks_of_nodes)

    @property
    def ranks(self) -> range:
        """Ranks of this node."""
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node_rank: int) -> range:
        """Ranks of a node."""
        first = sum(self.ranks_of_nodes[:node_rank])
        return range(first, first + self.ranks_of_nodes[node_rank])


@dataclass(frozen=True)
class JobFacts:
    """What all ranks of this node are told about the job.

    Args:
        job_dir: private directory of the job on this node.
        rendezvous: address of the job's key-value store.
        key_file: holds the key to it.
        master_addr: with `master_port`, where a script that uses torch.distributed itself finds rank 0.
        logical_ranks: of exact mode; None: no word about it.
        shared_dir: through which large objects go; None: no word about it.
        interface: network interface to keep such a script's sockets on; None leaves the choice to PyTorch.
        mpi: whether the ranks are MPI's as well.
        generation: how often the job has been started anew.
        kept_dir: outlives generations; None: there is none.
    """

    job_id: str
    job_dir: str
    rendezvous: str
    key_file: str
    master_addr: str
    master_port: int
    launcher_pid: int
    logical_ranks: int | None = None
    shared_dir: str | None = None
    interface: str | None = None
    mpi: bool = False
    generation: int = 0
    kept_dir: str | None = None


@dataclass(frozen=True)
class RankPlan:
    """How one rank is started; it inherits `descriptors`, and is bound to `cores` (None: as this process is)."""

    rank: int
    local_rank: int
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    descriptors: tuple[int, ...] = ()
    cores: frozenset[int] | None = None


def plan_ranks(layout: Layout, command: Sequence[str], facts: JobFacts, environ: Mapping[str, str], cores: int) -> list[RankPlan]:
    """The ranks of this node in order. What `environ` holds is kept; the place of the rank is added."""
    common = dict(environ) | (_common_variables(layout, facts, environ, cores) if layout.ranks else {})
    nodes = layout.ranks_of_nodes
    return [
        RankPlan(
            rank,
            local_rank,
            tuple(command),
            common
            | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            | horovod_words.place_variables(environ, rank, local_rank, nodes, layout.node_rank),
        )
        for local_rank, rank in enumerate(layout.ranks)
    ]


# Of a generation that has not begun nobody knows them: they are made when its launchers meet.
_MADE_LATE = (env.RENDEZVOUS, env.KEY_FILE, "MASTER_PORT")


def plan_next(plan: RankPlan, job_dir: str) -> RankPlan:
    """The same rank in the generation after, which will have the private directory `job_dir`, as far as it is known before."""
    known = {name: value for name, value in plan.environ.items() if name not in _MADE_LATE}
    return replace(plan, environ=known | {env.GENERATION: str(int(plan.environ[env.GENERATION]) + 1), env.JOB_DIR: job_dir})


def fits(known: RankPlan, plan: RankPlan) -> bool:
    """Whether `plan` is what was known of it before, and more of its environment."""
    return replace(known, environ={}) == replace(plan, environ={}) and known.environ.items() <= plan.environ.items()


def is_python(command: Sequence[str]) -> bool:
    """Whether a command runs a script or a module under this Python, as `target.rank_command` has it."""
    return tuple(command[:2]) == (sys.executable, "-u")


def threads_per_rank(cores: int, ranks_per_node: int) -> int:
    """OMP_NUM_THREADS that fills the cores once, for a user who has not set it."""
    return max(1, cores // ranks_per_node)


def _common_variables(layout: Layout, facts: JobFacts, environ: Mapping[str, str], cores: int) -> dict[str, str]:
    defaults = {"OMP_NUM_THREADS": str(threads_per_rank(cores, layout.ranks_per_node))}
    if facts.interface is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": facts.interface, "NCCL_SOCKET_IFNAME": facts.interface}
    exact = {} if facts.logical_ranks is None else {env.EXACT: str(facts.logical_ranks)}
    shared = {} if facts.shared_dir is None else {env.SHARED_DIR: facts.shared_dir}
    return (
        horovod_words.common_variables(environ)
        | exact
        | ({env.MPI: "1"} if facts.mpi else {})
        | shared
        | {name: environ.get(name) or value for name, value in defaults.items()}
        | {
            "WORLD_SIZE": str(layout.world_size),
            "LOCAL_WORLD_SIZE": str(layout.ranks_per_node),
            "NODE_RANK": str(layout.node_rank),
            "GROUP_RANK": str(layout.node_rank),
            "MASTER_ADDR": facts.master_addr,
            "MASTER_PORT": str(facts.master_port),
            env.JOB_ID: facts.job_id,
            env.JOB_DIR: facts.job_dir,
            env.KEPT_DIR: facts.kept_dir or "",  # not that of a job in which this launcher may run
            env.RENDEZVOUS: facts.rendezvous,
            env.KEY_FILE: facts.key_file,
            env.GENERATION: str(facts.generation),
            env.NODE_RANK: str(layout.node_rank),
            env.NUM_NODES: str(layout.num_nodes),
            env.LAUNCHER_PID: str(facts.launcher_pid),
        }
    )
