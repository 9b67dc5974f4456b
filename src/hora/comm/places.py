"""Which rank this process is and where it meets the others, from what `init` was given and from the environment. Pure.

Ways, in the order in which they are looked for: `init_method` (`env://`, `tcp://host:port`, `file:///path`), Hora's launcher, torchrun, a
bare `RANK` and `WORLD_SIZE`, Slurm, Open MPI, MPICH; a process that finds none is alone.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

from hora import env
from hora.comm.backends.mpi.meeting import AtMpi
from hora.comm.meeting import Alone, AtAgent, AtFile, AtLauncher, AtRankZero, Meeting
from hora.errors import ConfigError
from hora.topology import Topology, knows_local_rank, knows_node_rank

_METHODS = "env://, tcp://host:port, file:///path"
_DEFAULT_ADDRESS = "set MASTER_ADDR and MASTER_PORT to an address of rank 0's node and a free port there"


@dataclass(frozen=True)
class Place:
    """A process's place in the job.

    `local_known` is False when `topology` counts all ranks as on one node for want of better knowledge, `node_known` when it has taken the nodes to
    be alike and filled one after the other.
    """

    topology: Topology
    local_known: bool
    node_known: bool
    meeting: Meeting


def find_place(
    init_method: str | None,
    rank: int | None,
    world_size: int | None,
    environ: Mapping[str, str] = os.environ,
    parent_pid: int = 0,
    backend: str | None = None,
) -> Place:
    """Finds the place of this process.

    Args:
        init_method: `env://`, `tcp://host:port` or `file:///path`; None reads what the launcher left.
        rank: index of this process; with an `init_method` only.
        world_size: number of processes; with an `init_method` only.
        environ: variables to read.
        parent_pid: process that started this one: names the job where MPI leaves no name of it.
        backend: that was asked for: ranks that MPI started and that use it can meet through it.

    Raises:
        ConfigError: something is missing or impossible; the message names it.
    """
    if init_method is None:
        if rank is not None or world_size is not None:
            raise ConfigError(f"rank and world_size need an init_method to meet by; give one of: {_METHODS}")
        topology = Topology.from_env(environ)
    else:
        topology = _given_topology(urlsplit(init_method), rank, world_size, environ)
    known = knows_local_rank(topology.source, environ), knows_node_rank(topology.source, environ)
    if topology.alone:
        return Place(topology, True, True, Alone())
    if init_method is None or init_method.startswith("env:"):
        return Place(topology, *known, _meeting_by_source(topology, environ, parent_pid, backend))
    return Place(topology, *known, _meeting_by_url(init_method, several_nodes=topology.num_nodes > 1))


def _given_topology(url: SplitResult, rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> Topology:
    """The topology from arguments, else from the URL's query (as torch writes it), else from the environment."""
    if url.scheme not in ("env", "tcp", "file"):
        raise ConfigError(f"init_method must be one of {_METHODS}, but is {url.geturl()!r} instead")
    query = {name: int(values[0]) for name, values in parse_qs(url.query).items() if values[0].isdigit()}
    rank = query.get("rank") if rank is None else rank
    world_size = query.get("world_size") if world_size is None else world_size
    if rank is not None and world_size is not None:
        if world_size < 1:
            raise ConfigError(f"world_size must be at least 1, but is {world_size} instead")
        return Topology(rank=rank, world_size=world_size, source=url.scheme)
    found = Topology.from_env(environ)
    if found.source == "alone" or rank is not None or world_size is not None:
        missing = " and ".join(name for name, value in (("rank", rank), ("world_size", world_size)) if value is None)
        raise ConfigError(f"init_method {url.geturl()} needs {missing} as well; pass both to hora.init, or start with `hora run`")
    return found


def _meeting_by_url(init_method: str, *, several_nodes: bool) -> Meeting:
    url = urlsplit(init_method)
    if url.scheme == "file":
        return AtFile(Path(url.netloc + url.path))
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ConfigError(f"init_method must read tcp://host:port, but is {init_method!r} instead")
    return AtRankZero(_tcp(host, port), several_nodes)


def _meeting_by_source(topology: Topology, environ: Mapping[str, str], parent_pid: int, backend: str | None) -> Meeting:
    job = env.JobEnv.read(environ)
    if job.rendezvous is not None:
        return AtLauncher(job.rendezvous, _required(environ, env.KEY_FILE, "start with `hora run`, which sets it"))
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return AtAgent(*_master(environ))
    if "MASTER_ADDR" in environ or topology.source not in _JOB_NAMES:
        return AtRankZero(_tcp(*_master(environ)), topology.num_nodes > 1)
    if backend == "mpi" and topology.source in ("openmpi", "mpich"):
        return AtMpi()
    return _scheduled_meeting(topology, environ, parent_pid)


def _scheduled_meeting(topology: Topology, environ: Mapping[str, str], parent_pid: int) -> Meeting:
    """A meeting point that all ranks of a Slurm or MPI job derive alike: a socket file on one node, the first node's port else."""
    names = [environ[name] for name in _JOB_NAMES[topology.source] if name in environ] or [str(parent_pid)]
    digest = hashlib.sha256("/".join((topology.source, *names)).encode()).digest()
    # Below the ports that systems hand out by themselves (32768 and up).
    port = 10000 + int.from_bytes(digest[:4], "big") % 20000
    if topology.num_nodes == 1:
        local = f"unix://{env.state_dir(environ)}/sockets/job-{digest.hex()[:16]}.sock"
        return AtRankZero(_tcp("127.0.0.1", port) if env.portable_only(environ) else local)
    if "SLURM_STEP_NODELIST" not in environ:
        raise ConfigError(f"{topology.source} does not say where rank 0 of {topology.num_nodes} nodes is; {_DEFAULT_ADDRESS}")
    return AtRankZero(_tcp(first_host(environ["SLURM_STEP_NODELIST"]), port), several_nodes=True)


# Variables that name a job, and so differ between two jobs of a user on one node; MPICH has none, its parent process stands for it.
_JOB_NAMES: Mapping[str, tuple[str, ...]] = {
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "mpich": (),
}


_SIGN = re.compile(r"([^\[,]*)([\[,]?)(.*)", re.DOTALL)


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],login` gives `gpu03`, `r[1-2]n[7,9]` gives `r1n7`."""
    host = ""
    while node_list:
        prefix, sign, node_list = _SIGN.match(node_list).groups()  # type: ignore[union-attr]
        host += prefix
        if sign != "[":
            break
        numbers, _, node_list = node_list.partition("]")
        host += numbers.split(",")[0].split("-")[0]
    return host


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    host = _required(environ, "MASTER_ADDR", _DEFAULT_ADDRESS)
    port = _required(environ, "MASTER_PORT", _DEFAULT_ADDRESS)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"MASTER_PORT must be from 1 to 65535, but is {port!r} instead")
    return host, int(port)


def _required(environ: Mapping[str, str], name: str, remedy: str) -> str:
    if not environ.get(name):
        raise ConfigError(f"{name} is not set; {remedy}")
    return environ[name]


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
