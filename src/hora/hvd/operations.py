"""The operations that wait for their result, and what is differentiated through them."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hora.hvd import asynchronous
from hora.hvd.asynchronous import Average, Sum
from hora.hvd.basics import rank
from hora.hvd.compression import Compression, Compressor
from hora.hvd.exceptions import brief
from hora.hvd.handles import synchronize
from hora.hvd.process_sets import ProcessSet, global_process_set, require_set
from hora.hvd.submitting import as_group, choose_op, require_tensors


@brief
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combines `tensor` over the ranks of `process_set`; see `allreduce_async`. Its gradient is combined in the same way.

    Collective: by name.

    Args:
        tensor: as in `allreduce_async`; may be sparse, for Average and Sum.
        average: as in `allreduce_async`.
        name: as in `allreduce_async`.
        compression: what the tensor travels as.
        op: as in `allreduce_async`.
        prescale_factor: as in `allreduce_async`.
        postscale_factor: as in `allreduce_async`.
        process_set: who takes part.

    Raises:
        HorovodInternalError: the ranks asked for things that do not fit together, or one is gone; names both.
    """
    require_tensors("allreduce", tensor)
    op = choose_op(op, average)
    if tensor.is_sparse:
        return asynchronous.sparse_allreduce_async(tensor, name, op, process_set)()
    small, ctx = compression.compress(tensor)
    combined = _apply(_Allreduce, small, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(combined, ctx)


@brief
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `allreduce`, in place, and not differentiated. Collective: by name."""
    require_tensors("allreduce_", tensor)
    op = choose_op(op, average)
    return cast(Tensor, synchronize(asynchronous.allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set)))


@brief
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `allreduce`, of tensors that travel together. Collective: by name."""
    tensors = as_group("grouped_allreduce", tensors)
    op = choose_op(op, average)
    packed = [compression.compress(tensor) for tensor in tensors]
    combined = _apply(_GroupedAllreduce, name, op, prescale_factor, postscale_factor, process_set, *(small for small, _ in packed))
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(combined, packed, strict=True)]


@brief
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `grouped_allreduce`, in place, and not differentiated. Collective: by name."""
    tensors = as_group("grouped_allreduce_", tensors)
    op = choose_op(op, average)
    handle = asynchronous.grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    return cast("list[Tensor]", synchronize(handle))


@brief
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks behind one another in their first dimension, which may differ. Collective: by name.

    The gradient is the average over the ranks, of which each takes its own rows.
    """
    require_tensors("allgather", tensor)
    return cast(Tensor, _apply(_Allgather, tensor, name, process_set))


@brief
def grouped_allgather(tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Tensor]:
    """As `allgather`, of tensors that begin together. Collective: by name."""
    tensors = as_group("grouped_allgather", tensors)
    return list(_apply(_GroupedAllgather, name, process_set, *tensors))


@brief
def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensor of `root_rank`, its number in the world, on every rank. Collective: by name.

    The gradient is the average over the ranks on the root, and zero elsewhere.
    """
    require_tensors("broadcast", tensor)
    return cast(Tensor, _apply(_Broadcast, tensor, root_rank, name, process_set))


@brief
def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """As `broadcast`, in place, and not differentiated. Collective: by name."""
    require_tensors("broadcast_", tensor)
    return cast(Tensor, synchronize(asynchronous.broadcast_async_(tensor, root_rank, name, process_set)))


@brief
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends rows of `tensor` to every rank; see `alltoall_async`. Collective: by name. The gradient goes back the same way.

    Returns:
        What was received; with `splits` how many rows of each rank, too.
    """
    require_tensors("alltoall", tensor)
    require_set(process_set)
    output, received = _apply(_Alltoall, tensor, splits, name, process_set)
    return output if splits is None else (output, received)


@brief
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combines `tensor` and leaves each rank its rows; see `reducescatter_async`. Collective: by name. The gradient is gathered."""
    require_tensors("reducescatter", tensor)
    small, ctx = compression.compress(tensor)
    (part,) = _apply(_Reducescatter, name, op, process_set, prescale_factor, postscale_factor, small)
    return compression.decompress(part, ctx)


@brief
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As `reducescatter`, of tensors that begin together. Collective: by name."""
    tensors = as_group("grouped_reducescatter", tensors)
    packed = [compression.compress(tensor) for tensor in tensors]
    parts = _apply(_Reducescatter, name, op, process_set, prescale_factor, postscale_factor, *(small for small, _ in packed))
    return [compression.decompress(part, ctx) for part, (_, ctx) in zip(parts, packed, strict=True)]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return cast(Any, function).apply(*arguments)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet) -> Tensor:
        ctx.how = op, prescale, postscale, process_set
        return cast(Tensor, synchronize(asynchronous.allreduce_async(tensor, None, name, op, prescale, postscale, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, prescale, postscale, process_set = ctx.how
        gradient = gradients[0].contiguous()
        return allreduce(
            gradient, op=op, prescale_factor=prescale, postscale_factor=postscale, process_set=process_set
        ), None, None, None, None, None  # fmt: skip


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.how = op, prescale, postscale, process_set
        return tuple(synchronize(asynchronous.grouped_allreduce_async(tensors, None, name, op, prescale, postscale, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, prescale, postscale, process_set = ctx.how
        given = [gradient.contiguous() for gradient in gradients]
        combined = grouped_allreduce(given, op=op, prescale_factor=prescale, postscale_factor=postscale, process_set=process_set)
        return None, None, None, None, None, *combined


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        result = synchronize(asynchronous.allgather_async(tensor, name, process_set))
        ctx.rows, ctx.process_set = tensor.size(0), process_set
        return cast(Tensor, result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _own_rows([gradients[0]], [ctx.rows], ctx.process_set)[0], None, None


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rows, ctx.process_set = [tensor.size(0) for tensor in tensors], process_set
        return tuple(synchronize(asynchronous.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *_own_rows(gradients, ctx.rows, ctx.process_set)


def _own_rows(gradients: Sequence[Tensor], rows: Sequence[int], process_set: ProcessSet) -> list[Tensor]:
    """The averages of `gradients`, and of each the rows that this rank had given."""
    averages = grouped_allreduce([gradient.contiguous() for gradient in gradients], op=Average, process_set=process_set)
    counts = allgather(torch.tensor([list(rows)], device="cpu"), process_set=process_set)
    begins = counts[: process_set.rank()].sum(0).tolist()
    return [average.narrow(0, begin, count) for average, begin, count in zip(averages, begins, rows, strict=True)]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.how = root_rank, process_set
        return cast(Tensor, synchronize(asynchronous.broadcast_async(tensor, root_rank, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        root_rank, process_set = ctx.how
        average = allreduce(gradients[0].contiguous(), op=Average, process_set=process_set)
        return (average if rank() == root_rank else torch.zeros_like(average)), None, None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> tuple[Tensor, Tensor]:
        output, received = synchronize(asynchronous.alltoall_async(tensor, splits, name, process_set))
        ctx.rows, ctx.received, ctx.process_set = tensor.size(0), received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        back, _ = cast("tuple[Tensor, Tensor]", alltoall(gradients[0].contiguous(), splits=ctx.received, process_set=ctx.process_set))
        if back.size(0) < ctx.rows:  # rows that nobody was sent have no part in the result
            back = torch.cat([back, back.new_zeros(ctx.rows - back.size(0), *back.shape[1:])])
        return back, None, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, process_set: ProcessSet, prescale: float, postscale: float, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        ctx.process_set = process_set
        return tuple(synchronize(asynchronous.grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = [(gradient * ctx.factor).contiguous() for gradient in gradients]
        return None, None, None, None, None, *grouped_allgather(given, process_set=ctx.process_set)
