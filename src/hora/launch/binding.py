"""To which cores each rank of a node is bound. Pure, save for reading what the kernel says of the nodes of memory."""

import os
from collections.abc import Sequence
from pathlib import Path

from hora.errors import ConfigError
from hora.launch.options import Binding

_NODES = "sys/devices/system/node"


def cores_of_ranks(bind: Binding, ranks_per_node: int, root: Path = Path("/")) -> list[frozenset[int]] | None:
    """The cores of each rank of this node, out of those that this process may use; None: all of them.

    Raises:
        ConfigError: this system binds no process.
    """
    if bind == "none":
        return None
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"--bind {bind} needs an operating system that binds processes to cores, which this one does not; leave it out")
    allowed = sorted(os.sched_getaffinity(0))
    groups = [[core] for core in allowed] if bind == "core" else read_numa_nodes(allowed, root)
    return deal_groups(groups, ranks_per_node)


def deal_groups(groups: Sequence[Sequence[int]], ranks: int) -> list[frozenset[int]]:
    """Deals groups of cores out to ranks, in order and evenly; ranks share a group where there are more ranks than groups."""
    dealt = []
    for rank in range(ranks):
        first = rank * len(groups) // ranks
        end = max(first + 1, (rank + 1) * len(groups) // ranks)
        dealt.append(frozenset(core for group in groups[first:end] for core in group))
    return dealt


def read_numa_nodes(allowed: Sequence[int], root: Path = Path("/")) -> list[list[int]]:
    """The allowed cores of each node of memory that has any; all in one where the kernel knows none."""
    files = sorted((root / _NODES).glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    found = [[core for core in parse_cores(path.read_text(encoding="ascii")) if core in allowed] for path in files]
    return [cores for cores in found if cores] or [list(allowed)]


def parse_cores(text: str) -> list[int]:
    """A list of cores as the kernel writes it: `0-3,8`."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
