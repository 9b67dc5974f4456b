"""The collectives: calls that all ranks make together, in one order.

Each works on the session's default group, for tensors of any shape and layout on the session's device, synchronously or, with `async_op`, as a
`Work` to wait for. What backends do not do alike is settled here: means, booleans, types that a backend refuses to move, tensors that are not
contiguous, sizes that differ between ranks. A world of one takes the same path.

On a GPU a collective is done in the order of the current stream, as in torch.distributed. Exchanges of shapes (`all_gather`, `all_to_all`)
make the host wait.

Before its data moves the ranks agree on what each call is (`roll_call`): with `async_op` too a call returns when all ranks have made it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from hora.comm.algorithms import find_algorithm, settle_algorithm
from hora.comm.algorithms.base import Begun
from hora.comm.algorithms.compressed import check_compressible
from hora.comm.calling import What, run, run_planned, say
from hora.comm.dtypes import dtype_name
from hora.comm.operands import check_rank, equal_chunks, flatten, members_for
from hora.comm.reduce_op import ReduceOp, check_reducible
from hora.comm.shapes import exchange_shapes, swap_shapes
from hora.comm.subgroups import Subgroup
from hora.comm.work import Work
from hora.errors import ConfigError

__all__ = ["ReduceOp", "Work", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter"]

_NATIVE = find_algorithm("native")


@overload
def all_reduce(
    tensor: Tensor, op: ReduceOp = ..., *, algorithm: str = ..., wire_dtype: torch.dtype | None = ..., name: str = ...,
    group: Subgroup | None = ..., async_op: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def all_reduce(
    tensor: Tensor, op: ReduceOp = ..., *, algorithm: str = ..., wire_dtype: torch.dtype | None = ..., name: str = ...,
    group: Subgroup | None = ..., async_op: Literal[True],
) -> Work: ...  # fmt: skip
def all_reduce(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "native",
    wire_dtype: torch.dtype | None = None,
    name: str = "",
    group: Subgroup | None = None,
    async_op: bool = False,
) -> Tensor | Work:
    """Combines `tensor` over all ranks and leaves the result on every rank.

    Collective: all ranks call it in the same order with one shape, dtype and op.

    Args:
        tensor: overwritten with the result. float16, bfloat16, float32, float64, uint8, int8, int32, int64; bool with MIN (all), MAX (any).
        op: how; MEAN (the sum, divided by world_size) for floating-point types only. A NaN of any rank makes a NaN.
        algorithm: how the messages go. "native": the backend's own way; "ring", "hierarchical" (by node), "recursive_doubling" (small tensors);
            "ordered" adds in one fixed tree over the ranks. "auto" is the one of these that was measured to be the fastest for this size. All but
            "native" do their work before the call returns. See the page Algorithms.
        wire_dtype: torch.bfloat16 or torch.float16: so travels the sum of float32 or float64, with half the bytes or less; it is added up in its
            own type. Beyond 65504 float16 is infinite.
        name: tells this call from others of the same shape, so that ranks that make them in another order are told.
        group: which ranks make the call (`new_group`); by default all. Ranks count within it.
        async_op: return a `Work` when all ranks have made the call; `tensor` belongs to the group until it has been waited for.

    Returns:
        `tensor`.

    Raises:
        ConfigError: `tensor` is on another device than the session, or of a type that `op` does not fit.
        CollectiveMismatch: ranks made different calls; on every rank, before any data has moved.
        CollectiveTimeout: a rank did not call it in time; with `async_op` from `wait` too.
        PeerLost: a rank is gone; with `async_op` from `wait` too.
    """
    here = members_for(group, tensor)
    op = ReduceOp(op)
    check_reducible(tensor.dtype, op)
    if wire_dtype is not None:
        check_compressible(tensor.dtype, op)
    flat, copy_back = flatten(tensor)
    torch_op = ReduceOp.SUM if op is ReduceOp.MEAN else op

    # Backends compare as C does, where a NaN wins or loses by the rank it is on.
    spoilt = flat.isnan() if op in (ReduceOp.MIN, ReduceOp.MAX) and flat.is_floating_point() else None
    algorithm = settle_algorithm(algorithm, flat, here.groups)
    begin = find_algorithm(algorithm, wire_dtype).all_reduce

    def finish() -> Tensor:
        if op is ReduceOp.MEAN:
            flat.div_(here.world_size)
        if spoilt is not None:
            flat.masked_fill_(spoilt, math.nan)
        copy_back()
        return tensor

    def start(*, async_op: bool) -> Begun:
        others = () if spoilt is None else begin(spoilt, ReduceOp.MAX, here.groups, async_op=async_op)
        return *others, *begin(flat, torch_op, here.groups, async_op=async_op)

    what = f"{say(tensor)} {op.value} {algorithm}{'' if wire_dtype is None else f' as {dtype_name(wire_dtype)}'}"
    return run(here, What("all_reduce", what, name), [flat], start, finish, async_op)


@overload
def broadcast(
    tensor: Tensor, src: int = ..., *, name: str = ..., group: Subgroup | None = ..., async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def broadcast(tensor: Tensor, src: int = ..., *, name: str = ..., group: Subgroup | None = ..., async_op: Literal[True]) -> Work: ...
def broadcast(tensor: Tensor, src: int = 0, *, name: str = "", group: Subgroup | None = None, async_op: bool = False) -> Tensor | Work:
    """Overwrites `tensor` on every rank with that of rank `src`.

    Collective: all ranks call it in the same order with one shape, dtype and src.

    Args:
        tensor: of any dtype; read on `src`, overwritten elsewhere.
        src: the rank that has the values.
        name: as in `all_reduce`.
        group: as in `all_reduce`.
        async_op: return a `Work` when all ranks have made the call; `tensor` belongs to the group until it has been waited for.

    Returns:
        `tensor`.

    Raises:
        ConfigError: `tensor` is on another device than the session, or there is no rank `src`.
        CollectiveMismatch, CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = members_for(group, tensor)
    check_rank("src", src, here)
    flat, copy_back = flatten(tensor)

    def finish() -> Tensor:
        copy_back()
        return tensor

    start = partial(_NATIVE.broadcast, flat, src, here.groups)
    return run(here, What("broadcast", f"{say(tensor)} from rank {src}", name), [flat], start, finish, async_op)


@overload
def all_gather(
    tensor: Tensor,
    *,
    same_shape: bool = ...,
    algorithm: str = ...,
    name: str = ...,
    group: Subgroup | None = ...,
    async_op: Literal[False] = ...,
) -> list[Tensor]: ...
@overload
def all_gather(
    tensor: Tensor, *, same_shape: bool = ..., algorithm: str = ..., name: str = ..., group: Subgroup | None = ..., async_op: Literal[True]
) -> Work[list[Tensor]]: ...
def all_gather(
    tensor: Tensor,
    *,
    same_shape: bool = False,
    algorithm: str = "native",
    name: str = "",
    group: Subgroup | None = None,
    async_op: bool = False,
) -> list[Tensor] | Work[list[Tensor]]:
    """Gives every rank the tensors of all ranks, by rank.

    Collective: all ranks call it in the same order, with one dtype and shapes that may differ in the first dimension.

    Args:
        tensor: of any dtype and shape.
        same_shape: True promises that all ranks give one and the same shape, which spares an exchange of shapes, and on a GPU makes the host
            wait for nothing. A broken promise is refused, unless `check_calls` is off.
        algorithm: how the messages go, as in `all_reduce`; all but "ring" go as "native".
        name: as in `all_reduce`.
        group: as in `all_reduce`.
        async_op: return a `Work` as soon as the shapes are known; `tensor` belongs to the group until it has been waited for.

    Returns:
        One tensor a rank: views of one buffer, which belongs to the caller.

    Raises:
        ConfigError: `tensor` is on another device than the session.
        CollectiveMismatch: dtypes, or dimensions after the first, differ.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = members_for(group, tensor)
    flat, _ = flatten(tensor)
    gather = find_algorithm(algorithm).all_gather

    def begin() -> tuple[Callable[..., Begun], Callable[[], list[Tensor]]]:
        shapes = [tensor.shape] * here.world_size if same_shape else exchange_shapes(tensor, here)
        sizes = [shape.numel() for shape in shapes]
        sent = torch.nn.functional.pad(flat, (0, max(sizes) - flat.numel())) if max(sizes) > flat.numel() else flat
        received = flat.new_empty(here.world_size, max(sizes))
        start = partial(gather, received.view(-1), sent, here.groups)
        return start, lambda: [part[:size].view(shape) for part, size, shape in zip(received, sizes, shapes, strict=True)]

    what = say(tensor) if same_shape else f"{dtype_name(tensor.dtype)} tensors of any length"
    return run_planned(here, What("all_gather", what + _by(algorithm), name), [flat], begin, async_op)


@overload
def reduce_scatter(
    tensor: Tensor,
    op: ReduceOp = ...,
    *,
    algorithm: str = ...,
    name: str = ...,
    group: Subgroup | None = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor, op: ReduceOp = ..., *, algorithm: str = ..., name: str = ..., group: Subgroup | None = ..., async_op: Literal[True]
) -> Work: ...
def reduce_scatter(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    algorithm: str = "native",
    name: str = "",
    group: Subgroup | None = None,
    async_op: bool = False,
) -> Tensor | Work:
    """Combines `tensor` over all ranks and leaves each rank its chunk of the result.

    Collective: all ranks call it in the same order with one shape, dtype and op.

    Args:
        tensor: at least one dimension; the first is cut as by `torch.tensor_split`: the first chunks are one longer when it does not divide.
            Kept.
        op: as in `all_reduce`.
        algorithm: as in `all_gather`.
        name: as in `all_reduce`.
        group: as in `all_reduce`.
        async_op: return a `Work` when all ranks have made the call; `tensor` belongs to the group until it has been waited for.

    Returns:
        This rank's chunk, `[rows of this rank, ...]`.

    Raises:
        ConfigError: as in `all_reduce`; or `tensor` has no dimension.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = members_for(group, tensor)
    op = ReduceOp(op)
    check_reducible(tensor.dtype, op)
    if tensor.dim() == 0:
        raise ConfigError("reduce_scatter cuts the first dimension of a tensor, but this one has none; use all_reduce")
    chunks = tensor.detach().tensor_split(here.world_size)
    rows = chunks[0].size(0)
    sent = equal_chunks(tensor.detach(), chunks, rows)
    received = sent.new_empty(rows, *tensor.shape[1:])
    torch_op = ReduceOp.SUM if op is ReduceOp.MEAN else op

    def finish() -> Tensor:
        mine = received[: chunks[here.rank].size(0)]
        return mine.div_(here.world_size) if op is ReduceOp.MEAN else mine

    start = partial(find_algorithm(algorithm).reduce_scatter, received.view(-1), sent.view(-1), torch_op, here.groups)
    return run(here, What("reduce_scatter", f"{say(tensor)} {op.value}{_by(algorithm)}", name), [sent], start, finish, async_op)


@overload
def all_to_all(
    tensors: Sequence[Tensor], *, name: str = ..., group: Subgroup | None = ..., async_op: Literal[False] = ...
) -> list[Tensor]: ...
@overload
def all_to_all(
    tensors: Sequence[Tensor], *, name: str = ..., group: Subgroup | None = ..., async_op: Literal[True]
) -> Work[list[Tensor]]: ...
def all_to_all(
    tensors: Sequence[Tensor], *, name: str = "", group: Subgroup | None = None, async_op: bool = False
) -> list[Tensor] | Work[list[Tensor]]:
    """Sends `tensors[r]` to rank `r`, from every rank.

    Collective: all ranks call it in the same order, with one dtype; shapes are free.

    Args:
        tensors: one a rank.
        name: as in `all_reduce`.
        group: as in `all_reduce`.
        async_op: return a `Work` as soon as the shapes are known; the tensors belong to the group until it has been waited for.

    Returns:
        What this rank was sent, by sender: views of one buffer, which belongs to the caller.

    Raises:
        ConfigError: there is not one tensor a rank, or they differ in dtype, or are on another device than the session.
        CollectiveMismatch: dtypes differ between ranks.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = members_for(group, *tensors)
    if len(tensors) != here.world_size or len({tensor.dtype for tensor in tensors}) != 1:
        raise ConfigError(
            f"all_to_all takes {here.world_size} tensors of one dtype, one a rank, but got {[str(tensor.dtype) for tensor in tensors]}"
        )
    sent = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def begin() -> tuple[Callable[..., Begun], Callable[[], list[Tensor]]]:
        shapes = swap_shapes(tensors, here)
        sizes = [shape.numel() for shape in shapes]
        received = sent.new_empty(sum(sizes))
        start = partial(_NATIVE.all_to_all, received, sent, sizes, [tensor.numel() for tensor in tensors], here.groups)
        return start, lambda: [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]

    return run_planned(here, What("all_to_all", f"{dtype_name(sent.dtype)} tensors of any length", name), [sent], begin, async_op)


def barrier(*, group: Subgroup | None = None) -> None:
    """Returns when all ranks have called it; on a GPU, when all have also done what they had begun before.

    Collective: all ranks call it.

    Raises:
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = members_for(group)
    token = torch.zeros(1, dtype=torch.int32, device=here.device)
    start = partial(_NATIVE.all_reduce, token, ReduceOp.SUM, here.groups)
    # Reading the value makes the host wait for the device.
    run(here, What("barrier", "no tensor"), [], start, token.item, False)


def _by(algorithm: str) -> str:
    return "" if algorithm == "native" else f" {algorithm}"
