"""Algorithm `auto`: the one that was measured to be the fastest for a tensor of this size here.

It looks the size up in the session's table (`plan.algorithm_table`), which all ranks have from rank 0 since they met: that which `hora bench
allreduce --save` has written for the user, over the one that comes with Hora. Where nothing was measured, and in exact mode, where a file must
not decide about bits, it is `native`.
"""

from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora import env, log
from hora.comm.algorithms.base import Algorithm, Begun
from hora.comm.algorithms.native import Native
from hora.comm.groups import Groups
from hora.comm.reduce_op import ReduceOp
from hora.errors import ConfigError
from hora.plan.algorithm_table import Table, choose, parse


class Auto(Native):
    """All-reduce as the table says; the rest goes as in `native`.

    Args:
        algorithms: from which it chooses, by name.
    """

    def __init__(self, algorithms: Mapping[str, Algorithm]) -> None:
        self._algorithms = algorithms

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        return self._algorithms[choice(tensor, groups)].all_reduce(tensor, op, groups, async_op=async_op)


def choice(tensor: Tensor, groups: Groups) -> str:
    """The name of the algorithm that reduces `tensor`; the same on all ranks."""
    size, device = tensor.nbytes, tensor.device.type
    if (name := groups.choices.get((size, device))) is None:
        nodes, backend = groups.nodes, dist.get_backend(groups.world)
        name = choose(groups.table, size, device, backend, groups.world.size(), len(nodes.ranks), interleaved=nodes.interleaved)
        groups.choices[size, device] = name
    return name


def table_path() -> Path:
    """Where the user's table is kept."""
    return env.state_dir() / "algorithms.json"


def read_own_text(known: Collection[str]) -> str | None:
    """The text of the user's table; None where there is none. One that is damaged, or names others than `known`, is left out with a warning."""
    try:
        path = table_path()
    except ConfigError:  # nowhere to keep one
        return None
    try:
        text = path.read_text(encoding="utf-8")
        parse(text, known)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.get_logger().warning("%s is left out, for it is damaged: %s; `hora bench allreduce --save` writes it anew", path, error)
        return None
    return text


def table_from(own_text: str | None, known: Collection[str]) -> Table:
    """The user's table, as `read_own_text` gives it, over the one that comes with Hora."""
    shipped = parse((resources.files(__package__) / "auto.json").read_text(encoding="utf-8"), known)
    return shipped if own_text is None else parse(own_text, known).over(shipped)
