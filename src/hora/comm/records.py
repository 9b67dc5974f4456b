"""What each rank says of itself when it joins, and what follows from it: who shares a node with whom."""

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch

import hora
from hora.comm.exactness import Exact
from hora.topology import Topology


@dataclass(frozen=True)
class Record:
    """What a rank says of itself. `visible_gpus` is its CUDA_VISIBLE_DEVICES, `started_s` when its process began."""

    rank: int
    world_size: int
    node_rank: int
    local_rank: int
    host: str
    pid: int
    pid_namespace: str
    started_s: float
    backend: str
    device_type: str
    hora: str
    torch: str
    python: str
    exact: str
    num_gpus: int
    visible_gpus: str | None


def introduce(topology: Topology, backend: str, device: torch.device, exact: Exact | None) -> Record:
    """The record of this process."""
    return Record(
        rank=topology.rank,
        world_size=topology.world_size,
        node_rank=topology.node_rank,
        local_rank=topology.local_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_namespace=_pid_namespace(),
        started_s=psutil.Process().create_time(),
        backend=backend,
        device_type=device.type,
        hora=hora.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        exact=str(exact or "off"),
        num_gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _pid_namespace() -> str:
    """Which numbering of processes this one is in: containers of one host may each have their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def place_by_hosts(records: Sequence[Record]) -> list[Record]:
    """The records with nodes and local ranks counted from the ranks' hosts."""
    hosts = list(dict.fromkeys(record.host for record in records))
    counts = dict.fromkeys(hosts, 0)
    placed = []
    for record in records:
        placed.append(replace(record, node_rank=hosts.index(record.host), local_rank=counts[record.host]))
        counts[record.host] += 1
    return placed


def neighbours_of(record: Record, records: Sequence[Record]) -> list[Record]:
    """The ranks of the same node, by local rank, `record` among them."""
    return sorted((other for other in records if other.node_rank == record.node_rank), key=lambda other: other.local_rank)


def say_ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 2 and 3`, `ranks 1, 2 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks[:-1]) + f" and {ranks[-1]}"
