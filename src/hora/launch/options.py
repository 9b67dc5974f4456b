"""What the user asked of the launcher, and whether it can be. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hora.env import LONGEST_S
from hora.errors import ConfigError
from hora.launch.deadlines import Deadlines
from hora.launch.hosts import Host

TargetKind = Literal["script", "module", "program"]
Binding = Literal["none", "core", "numa"]

_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_%-]*")


@dataclass(frozen=True)
class LaunchOptions:
    """What the user asked for.

    Args:
        target: script, module or program to run; `args` are its arguments, untouched.
        kind: what `target` is; "script" also finds out by itself that it is a module.
        nproc_per_node: a number, or `auto`, `gpu` or `cpu` to count what this node has; None: 1, or the slots of each host.
        nproc: ranks of the whole job, instead of or in agreement with `nproc_per_node`.
        master_addr: address of node 0, by which the other nodes reach it.
        master_port: port of node 0; None takes a free one on one node, 29500 on several.
        key_file: holds the key that the launchers of all nodes share; None is the user's own.
        log_dir: where the ranks' logs go; None is a directory of the job's own, of which the newest 20 are kept.
        log_word: what names that directory on the command line, for advice.
        output_dir: where the two streams of each rank are kept apart, beside the logs; None: nowhere.
        grace_s: how long ranks may take to end after they were asked to.
        deadlines: how long ranks may make no progress.
        join_timeout_s: how long to wait for the other nodes.
        logical_ranks: those of exact mode, for scripts that call `hora.init()`; None leaves it to them.
        hosts: where the ranks run: this launcher starts agents there, through `rsh` (None: ssh), with the Python `remote_python` (None: of
            the same path as this one's). None: this node, and others if `num_nodes` says so, where somebody starts launchers like this one.
        wdir: where the ranks run on each host, None: in the directory of this launcher.
        interface: network interface of each host; None: that on the way to the others.
        bind: to what each rank of a node is bound: "none", its share of the cores ("core"), or of the nodes of memory ("numa").
        mpi: whether the ranks are to be ranks of MPI as well.
        exports: variables to set for the ranks.
        shared_dir: directory that all nodes see, through which large objects go; None leaves it to the scripts.
        slurm_options: for `sbatch`, where the job is given to it.
        max_restarts: how many times all ranks are started anew when one fails or a host is lost; for one node, or `hosts`.
        warm_spares: whether processes that have loaded torch wait beside the ranks to be those of the next start.
        min_ranks: the fewest ranks to go on with when hosts are lost; None: all of them are needed.
        max_ranks: the most ranks; hosts that come back, or come anew, are taken in until there are so many.
        host_discovery: command that prints the hosts there are, in place of `hosts`; hosts are taken in and left out accordingly.
        discovery_interval_s: how often it is asked, and how soon a host that was lost is asked again, the first time.
        generation: how many times ranks have been started anew; counted by the launcher.
        job_id: name of the job, the same in all its generations; None: a new one.
        kept_dir: directory of this machine that outlives generations; made by the launcher.
        quiet: show the output of the first rank of this node only; the logs hold all of it.
        verbose: say what was decided.
    """

    target: str
    args: tuple[str, ...] = ()
    kind: TargetKind = "script"
    nproc_per_node: str | None = None
    nproc: int | None = None
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    key_file: Path | None = None
    log_dir: Path | None = None
    log_word: str = "--log-dir"
    output_dir: Path | None = None
    grace_s: float = 30.0
    deadlines: Deadlines = field(default_factory=Deadlines)
    join_timeout_s: float = 300.0
    logical_ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    rsh: str | None = None
    remote_python: str | None = None
    wdir: str | None = None
    interface: str | None = None
    bind: Binding = "none"
    mpi: bool = False
    exports: Mapping[str, str] = field(default_factory=dict)
    shared_dir: Path | None = None
    slurm_options: tuple[str, ...] = ()
    max_restarts: int = 0
    warm_spares: bool = False
    min_ranks: int | None = None
    max_ranks: int | None = None
    host_discovery: tuple[str, ...] = ()
    discovery_interval_s: float = 10.0
    generation: int = 0
    job_id: str | None = None
    kept_dir: Path | None = None
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError("; ".join(problems))

    @property
    def counts_host(self) -> bool:
        """Whether the number of ranks depends on what a node has."""
        return self.nproc_per_node in ("auto", "gpu", "cpu")

    @property
    def counts_gpus(self) -> bool:
        """Whether the number of ranks depends on the GPUs of this node."""
        return self.nproc_per_node in ("auto", "gpu")

    @property
    def elastic(self) -> bool:
        """Whether hosts may come to the job, and come back."""
        return self.max_ranks is not None or bool(self.host_discovery)

    @property
    def fewest_ranks(self) -> int:
        """With how many ranks the job can run, where hosts may be missing."""
        return self.min_ranks or self.nproc or 1

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
            (0 <= self.grace_s <= LONGEST_S, f"--grace must be 0 seconds or more, {LONGEST_S:.0e} at most, but is {self.grace_s} instead"),
            (
                not self.mpi or (self.num_nodes == 1 and len(self.hosts) < 2 and not self.elastic),
                f"--mpi is for one node, and not for {max(self.num_nodes, len(self.hosts), 2)}; on several use the MPI's own launcher: "
                "mpiexec ... python -m hora.mpi",
            ),
            (self.max_restarts >= 0, f"--max-restarts must be 0 or more, but is {self.max_restarts} instead"),
            (
                self.max_restarts == 0 or self.num_nodes == 1,
                f"--max-restarts is for jobs that one command starts, but there are {self.num_nodes} nodes with a command each; name the hosts "
                "in one with -H",
            ),
            (
                not self.warm_spares or (self.max_restarts > 0 and not self.hosts and not self.elastic),
                "--warm-spares keeps processes ready for the next start of a job on this node, so it needs --max-restarts, and goes without -H and "
                "--host-discovery: on other hosts nothing outlives a start",
            ),
            *self._checks_of_numbers(),
            (
                0 < self.join_timeout_s <= LONGEST_S,
                f"--join-timeout must be more than 0 seconds, {LONGEST_S:.0e} at most, but is {self.join_timeout_s} instead",
            ),
        )
        return [problem for holds, problem in checks if not holds]

    def _checks_of_numbers(self) -> tuple[tuple[bool, str], ...]:
        """What must hold of a number of ranks that may change."""
        on_hosts = bool(self.hosts or self.host_discovery)
        fewest, most = self.fewest_ranks, self.max_ranks or self.nproc
        return (
            (self.min_ranks is None or self.min_ranks >= 1, f"--min-ranks must be at least 1, but is {self.min_ranks} instead"),
            (
                self.min_ranks is None or (on_hosts and (self.max_restarts > 0 or self.elastic)),
                "--min-ranks says with how many a job goes on that has lost hosts, so it needs -H and --max-restarts, or --max-ranks",
            ),
            (self.max_ranks is None or self.max_ranks >= 1, f"--max-ranks must be at least 1, but is {self.max_ranks} instead"),
            (self.max_ranks is None or on_hosts, "--max-ranks says how many hosts are taken in, so it needs -H or --host-discovery"),
            (
                not self.elastic or self.min_ranks is not None or self.nproc is not None,
                "--max-ranks and --host-discovery need to know how few ranks will do; say so with --min-ranks (or -np)",
            ),
            (
                not self.elastic or most is None or fewest <= most,
                f"there must be no more of --min-ranks (or -np) than of --max-ranks, but it is {fewest} and {most}",
            ),
            (
                self.nproc is None or not self.elastic or fewest <= self.nproc <= (most or self.nproc),
                f"-np must lie between --min-ranks and --max-ranks, but is {self.nproc}",
            ),
            (
                self.logical_ranks is None or not self.elastic or (most or 0) <= self.logical_ranks,
                f"in exact mode there must be no more ranks than logical ones ({self.logical_ranks}), but --max-ranks is {most}",
            ),
            (
                not self.counts_host or (self.min_ranks is None and not self.elastic),
                f"--min-ranks, --max-ranks and --host-discovery need to know the slots of a host, but --nproc-per-node is {self.nproc_per_node}; "
                "say `host:N`, or give a number",
            ),
            (
                0 < self.discovery_interval_s <= LONGEST_S,
                f"--discovery-interval must be more than 0 seconds, {LONGEST_S:.0e} at most, but is {self.discovery_interval_s} instead",
            ),
        )
