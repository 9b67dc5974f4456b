"""What `--horovod` tells the ranks: Horovod's variables, and where `import horovod` finds Hora's answer. Pure."""

import os
from collections.abc import Mapping
from pathlib import Path

from hora import env

STANDIN = Path(__file__).parent.parent / "hvd" / "standin"
"""Directory in which `import horovod` finds Hora's answer."""


def common_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What all ranks of a node are told, where `environ` asks for it."""
    if environ.get(env.HOROVOD) != "1":
        return {}
    path = [str(STANDIN), *filter(None, [environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def place_variables(
    environ: Mapping[str, str], rank: int, local_rank: int, ranks_of_nodes: tuple[int, ...], node_rank: int
) -> dict[str, str]:
    """The place of one rank, where `environ` asks for it."""
    if environ.get(env.HOROVOD) != "1":
        return {}
    # The nodes that have a rank of this local rank, in order.
    counterparts = [node for node, ranks in enumerate(ranks_of_nodes) if ranks > local_rank]
    places = {
        "RANK": rank,
        "SIZE": sum(ranks_of_nodes),
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": ranks_of_nodes[node_rank],
        "CROSS_RANK": counterparts.index(node_rank),
        "CROSS_SIZE": len(counterparts),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in places.items()} | {"HOROVOD_HOSTNAME": os.uname().nodename}
