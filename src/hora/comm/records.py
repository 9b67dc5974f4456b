"""What each rank says of itself when it joins, and what follows from it: who shares a node with whom."""

import hashlib
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

import hora
from hora import env
from hora.comm.algorithms import own_algorithm_table
from hora.comm.exactness import Exact
from hora.topology import Topology

_LONGEST_VALUE = 200


@dataclass(frozen=True)
class Settings:
    """What `hora.init` was told that must be the same on all ranks."""

    exact: Exact | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    check_calls: bool = True
    backend: str | None = None


@dataclass(frozen=True)
class Record:
    """What a rank says of itself.

    `visible_gpus` is its CUDA_VISIBLE_DEVICES, `shares_gpus` whether it may work on one with other ranks, `started_s` when its process began,
    `script` the digest of the file that it runs, `config` the configuration as text by dotted names. `algorithms` is the text of the user's
    table of algorithms, of rank 0 only, for all to use.
    """

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
    script: str
    exact: str
    check_calls: bool
    config: dict[str, str]
    num_gpus: int
    visible_gpus: str | None
    shares_gpus: bool = False
    algorithms: str | None = None


def introduce(topology: Topology, backend: str, device: torch.device, settings: Settings) -> Record:
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
        script=digest_of_script(getattr(sys.modules.get("__main__"), "__file__", None)),
        exact=str(settings.exact or "off"),
        check_calls=settings.check_calls,
        config=dict(flatten_config(settings.config)),
        num_gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        shares_gpus=os.environ.get(env.SHARE_GPUS) == "1",
        algorithms=own_algorithm_table() if topology.rank == 0 and settings.exact is None else None,
    )


def digest_of_script(path: str | None) -> str:
    """What tells one text of a script from another; "none" where there is no file. Who runs it (`#!/...`) is no matter."""
    try:
        text = Path(path or "").read_bytes()
    except OSError:
        return "none"
    first, _, rest = text.partition(b"\n")
    return f"sha256 {hashlib.sha256(rest if first.startswith(b'#!') else text).hexdigest()[:16]}"


def flatten_config(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a configuration as text, by dotted names; long ones by their beginning and a digest."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten_config(inner, f"{name}.{key}" if name else str(key))
        return
    # What differs between processes that say the same: addresses, and the order of sets.
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value))
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"
    yield name, text


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


def number_nodes(records: Sequence[Record]) -> list[Record]:
    """The records with nodes numbered by the ranks' hosts, where those that were guessed contradict these; local ranks are kept."""
    hosts = list(dict.fromkeys(record.host for record in records))
    guessed = {record.node_rank for record in records}
    if len(hosts) == 1 or len({(record.node_rank, record.host) for record in records}) == len(hosts) == len(guessed):
        return list(records)
    return [replace(record, node_rank=hosts.index(record.host)) for record in records]


def several_hosts(records: Sequence[Record]) -> str | None:
    """What speaks against shared memory: ranks on other hosts, or in other containers; None if nothing does."""
    first = records[0]
    for record in records:
        if (record.host, record.pid_namespace, record.node_rank) != (first.host, first.pid_namespace, first.node_rank):
            where = f"on {record.host}" if record.host != first.host else f"on node {record.node_rank}, or in another container"
            return f"rank {first.rank} is on {first.host} (node {first.node_rank}), rank {record.rank} {where}"
    return None


def neighbours_of(record: Record, records: Sequence[Record]) -> list[Record]:
    """The ranks of the same node, by local rank, `record` among them."""
    return sorted((other for other in records if other.node_rank == record.node_rank), key=lambda other: other.local_rank)


def say_ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 2 and 3`, `ranks 1, 2 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks[:-1]) + f" and {ranks[-1]}"
