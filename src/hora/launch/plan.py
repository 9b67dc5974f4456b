"""Who runs on this node, with which command and which environment. Pure: reads no file, starts nothing.

Ranks are numbered node by node: `rank = node_rank * ranks_per_node + local_rank`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hora import env
from hora.errors import ConfigError

TargetKind = Literal["script", "module", "program"]

_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_%-]*")


@dataclass(frozen=True)
class LaunchOptions:
    """What the user asked for.

    Args:
        target: script, module or program to run; `args` are its arguments, untouched.
        kind: what `target` is; "script" also finds out by itself that it is a module.
        nproc_per_node: a number, or `auto`, `gpu` or `cpu` to count what this node has.
        nproc: ranks of the whole job, instead of or in agreement with `nproc_per_node`.
        master_addr: address of node 0, by which the other nodes reach it.
        master_port: port of node 0; None takes a free one on one node, 29500 on several.
        key_file: holds the key that the launchers of all nodes share; None is the user's own.
        log_dir: where the ranks' logs go; None is a directory of the job's own, of which the newest 20 are kept.
        grace_s: how long ranks may take to end after they were asked to.
        join_timeout_s: how long to wait for the other nodes.
        logical_ranks: those of exact mode, for scripts that call `hora.init()`; None leaves it to them.
        mpi: whether the ranks are to be ranks of MPI as well.
        exports: variables to set for the ranks.
        shared_dir: directory that all nodes see, through which large objects go; None leaves it to the scripts.
        quiet: show the output of the first rank of this node only; the logs hold all of it.
        verbose: say what was decided.
    """

    target: str
    args: tuple[str, ...] = ()
    kind: TargetKind = "script"
    nproc_per_node: str = "1"
    nproc: int | None = None
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    key_file: Path | None = None
    log_dir: Path | None = None
    grace_s: float = 30.0
    join_timeout_s: float = 300.0
    logical_ranks: int | None = None
    mpi: bool = False
    exports: Mapping[str, str] = field(default_factory=dict)
    shared_dir: Path | None = None
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError("; ".join(problems))

    @property
    def counts_gpus(self) -> bool:
        """Whether the number of ranks depends on the GPUs of this node."""
        return self.nproc_per_node in ("auto", "gpu")

    def _problems(self) -> list[str]:
        checks = (
            (bool(self.target), "the script to run must not be empty"),
            (self.num_nodes >= 1, f"--nnodes must be at least 1, but is {self.num_nodes} instead"),
            (
                0 <= self.node_rank < max(1, self.num_nodes),
                f"--node-rank must be from 0 to nnodes - 1 = {self.num_nodes - 1}, but is {self.node_rank} instead",
            ),
            (
                self.master_port is None or 0 < self.master_port < 65536,
                f"--master-port must be from 1 to 65535, but is {self.master_port} instead",
            ),
            (
                _HOST.fullmatch(self.master_addr) is not None,
                f"--master-addr must be a host name or an address, but is {self.master_addr!r} instead",
            ),
            (self.nproc is None or self.nproc >= 1, f"-np must be at least 1, but is {self.nproc} instead"),
            (0 <= self.grace_s < float("inf"), f"--grace must be 0 seconds or more, but is {self.grace_s} instead"),
            (
                not self.mpi or self.num_nodes == 1,
                f"--mpi is for one node, but --nnodes is {self.num_nodes}; on several use the MPI's own launcher: mpiexec ... python -m hora.mpi",
            ),
            (0 < self.join_timeout_s < float("inf"), f"--join-timeout must be more than 0 seconds, but is {self.join_timeout_s} instead"),
        )
        return [problem for holds, problem in checks if not holds]


def count_ranks(options: LaunchOptions, *, cores: int, gpus: int) -> int:
    """How many ranks this node runs, on a node with so many cores and GPUs.

    Raises:
        ConfigError: the number is none, is 0, cannot be dealt to the nodes, or `-np` and `--nproc-per-node` contradict each other.
    """
    if options.nproc is None:
        return _per_node(options.nproc_per_node, cores, gpus)
    share, rest = divmod(options.nproc, options.num_nodes)
    if rest:
        raise ConfigError(
            f"-np {options.nproc} counts the ranks of all nodes and must be a multiple of --nnodes {options.num_nodes}; "
            "or say --nproc-per-node instead"
        )
    if options.nproc_per_node != "1" and _per_node(options.nproc_per_node, cores, gpus) != share:
        raise ConfigError(
            f"-np {options.nproc} on {options.num_nodes} nodes is {share} a node, but --nproc-per-node is {options.nproc_per_node}; give one of them"
        )
    return share


def _per_node(text: str, cores: int, gpus: int) -> int:
    if text == "gpu" and not gpus:
        raise ConfigError("--nproc-per-node gpu needs a GPU, but none is visible on this node; give a number, or `cpu`")
    counted = {"auto": gpus or cores, "gpu": gpus, "cpu": cores}
    if text in counted:
        return counted[text]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--nproc-per-node must be a number from 1, `auto`, `cpu` or `gpu`, but is {text!r} instead")
    return int(text)


@dataclass(frozen=True)
class Layout:
    """How many nodes of how many ranks each, and which node this is."""

    num_nodes: int
    node_rank: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks(self) -> range:
        """Ranks of this node."""
        return range(self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node)


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
        loopback: interface to keep such a script's sockets on; None leaves the choice to PyTorch.
        mpi: whether the ranks are MPI's as well.
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
    loopback: str | None = None
    mpi: bool = False
    generation: int = 0


@dataclass(frozen=True)
class RankPlan:
    """How one rank is started; it inherits `descriptors`."""

    rank: int
    local_rank: int
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    descriptors: tuple[int, ...] = ()


def plan_ranks(layout: Layout, command: Sequence[str], facts: JobFacts, environ: Mapping[str, str], cores: int) -> list[RankPlan]:
    """The ranks of this node in order. What `environ` holds is kept; the place of the rank is added."""
    common = dict(environ) | _common_variables(layout, facts, environ, cores)
    return [
        RankPlan(rank, local_rank, tuple(command), common | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)})
        for local_rank, rank in enumerate(layout.ranks)
    ]


def threads_per_rank(cores: int, ranks_per_node: int) -> int:
    """OMP_NUM_THREADS that fills the cores once, for a user who has not set it."""
    return max(1, cores // ranks_per_node)


def _common_variables(layout: Layout, facts: JobFacts, environ: Mapping[str, str], cores: int) -> dict[str, str]:
    defaults = {"OMP_NUM_THREADS": str(threads_per_rank(cores, layout.ranks_per_node))}
    if facts.loopback is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": facts.loopback, "NCCL_SOCKET_IFNAME": facts.loopback}
    exact = {} if facts.logical_ranks is None else {env.EXACT: str(facts.logical_ranks)}
    shared = {} if facts.shared_dir is None else {env.SHARED_DIR: facts.shared_dir}
    return (
        exact
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
            env.RENDEZVOUS: facts.rendezvous,
            env.KEY_FILE: facts.key_file,
            env.GENERATION: str(facts.generation),
            env.NODE_RANK: str(layout.node_rank),
            env.NUM_NODES: str(layout.num_nodes),
            env.LAUNCHER_PID: str(facts.launcher_pid),
        }
    )
