"""Many tensors combined at once."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from hora.comm.algorithms import find_algorithm
from hora.comm.algorithms.base import Begun
from hora.comm.algorithms.compressed import check_compressible
from hora.comm.calling import What, run, say
from hora.comm.dtypes import dtype_name
from hora.comm.operands import members_for
from hora.comm.reduce_op import ReduceOp, check_reducible
from hora.comm.subgroups import Subgroup
from hora.comm.work import Work
from hora.errors import ConfigError


@overload
def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: ReduceOp = ...,
    *,
    wire_dtype: torch.dtype | None = ...,
    name: str = ...,
    group: Subgroup | None = ...,
    async_op: Literal[False] = ...,
) -> list[Tensor]: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: ReduceOp = ...,
    *,
    wire_dtype: torch.dtype | None = ...,
    name: str = ...,
    group: Subgroup | None = ...,
    async_op: Literal[True],
) -> Work[list[Tensor]]: ...
def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    *,
    wire_dtype: torch.dtype | None = None,
    name: str = "",
    group: Subgroup | None = None,
    async_op: bool = False,
) -> list[Tensor] | Work[list[Tensor]]:
    """Combines many tensors at once, each over all ranks: as one message for each dtype.

    Collective: all ranks call it in the same order with the same number of tensors, shapes, dtypes and op.

    Args:
        tensors: each as for `all_reduce`; overwritten with the results.
        op: as in `all_reduce`, but MIN and MAX.
        wire_dtype: as in `all_reduce`.
        name: as in `all_reduce`.
        group: as in `all_reduce`.
        async_op: as in `all_reduce`.

    Returns:
        `tensors`.

    Raises:
        ConfigError, CollectiveMismatch, CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = members_for(group, *tensors)
    op = ReduceOp(op)
    for tensor in tensors:
        check_reducible(tensor.dtype, op)
        if wire_dtype is not None:
            check_compressible(tensor.dtype, op)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        raise ConfigError(f"all_reduce_coalesced takes sums, means and products, but op is {op.value}; call all_reduce for each tensor")
    algorithm = find_algorithm("native", wire_dtype)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    flats = [torch.cat([tensor.reshape(-1) for tensor in alike]) for alike in by_dtype.values()]

    def start(*, async_op: bool) -> Begun:
        torch_op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        return [work for flat in flats for work in algorithm.all_reduce(flat, torch_op, here.groups, async_op=async_op)]

    def finish() -> list[Tensor]:
        for flat, alike in zip(flats, by_dtype.values(), strict=True):
            if op is ReduceOp.MEAN:
                flat.div_(here.world_size)
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        return list(tensors)

    wire = "" if wire_dtype is None else f" as {dtype_name(wire_dtype)}"
    what = f"{op.value}{wire} of {len(tensors)} tensors: {', '.join(map(say, tensors))}"
    return run(here, What("all_reduce_coalesced", what, name), flats, start, finish, async_op)
