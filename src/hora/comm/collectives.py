"""The collectives: calls that all ranks make together, in one order.

Each works on the session's default group, for tensors of any shape and layout on the session's device, synchronously or, with `async_op`, as a
`Work` to wait for. What backends do not do alike is settled here: means, booleans, types that a backend refuses to move, tensors that are not
contiguous, sizes that differ between ranks. A world of one takes the same path.

On a GPU a collective is done in the order of the current stream, as in torch.distributed. Exchanges of shapes (`all_gather`, `all_to_all`)
make the host wait.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from hora.comm.algorithms import find_algorithm
from hora.comm.algorithms.base import Begun
from hora.comm.dtypes import DTYPES
from hora.comm.reduce_op import ReduceOp, check_reducible
from hora.comm.session import Session, session
from hora.comm.work import Work
from hora.errors import CollectiveMismatch, ConfigError

__all__ = ["ReduceOp", "Work", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "recv", "reduce_scatter", "send"]

_Result = TypeVar("_Result")
_NATIVE = find_algorithm("native")

# A shape travels as dtype, number of dimensions, dimensions.
_MAX_DIMENSIONS = 14
_HEADER_LENGTH = 2 + _MAX_DIMENSIONS


@overload
def all_reduce(tensor: Tensor, op: ReduceOp = ..., *, algorithm: str = ..., async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, op: ReduceOp = ..., *, algorithm: str = ..., async_op: Literal[True]) -> Work: ...
def all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, algorithm: str = "native", async_op: bool = False) -> Tensor | Work:
    """Combines `tensor` over all ranks and leaves the result on every rank.

    Collective: all ranks call it in the same order with one shape, dtype and op.

    Args:
        tensor: overwritten with the result. float16, bfloat16, float32, float64, uint8, int8, int32, int64; bool with MIN (all), MAX (any).
        op: how; MEAN (the sum, divided by world_size) for floating-point types only.
        algorithm: how the messages go; "native" is the backend's own way.
        async_op: return a `Work` at once; `tensor` belongs to the group until it has been waited for.

    Returns:
        `tensor`.

    Raises:
        ConfigError: `tensor` is on another device than the session, or of a type that `op` does not fit.
        CollectiveTimeout: a rank did not call it in time; with `async_op` from `wait`.
        PeerLost: a rank is gone; with `async_op` from `wait`.
    """
    here = _check(tensor)
    op = ReduceOp(op)
    check_reducible(tensor.dtype, op)
    flat, copy_back = _flat(tensor)
    torch_op = ReduceOp.SUM if op is ReduceOp.MEAN else op

    def finish() -> Tensor:
        if op is ReduceOp.MEAN:
            flat.div_(here.world_size)
        copy_back()
        return tensor

    start = partial(find_algorithm(algorithm).all_reduce, flat, torch_op, here.group)
    return _run(here, "all_reduce", [flat], start, finish, async_op)


@overload
def broadcast(tensor: Tensor, src: int = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def broadcast(tensor: Tensor, src: int = ..., *, async_op: Literal[True]) -> Work: ...
def broadcast(tensor: Tensor, src: int = 0, *, async_op: bool = False) -> Tensor | Work:
    """Overwrites `tensor` on every rank with that of rank `src`.

    Collective: all ranks call it in the same order with one shape, dtype and src.

    Args:
        tensor: of any dtype; read on `src`, overwritten elsewhere.
        src: the rank that has the values.
        async_op: return a `Work` at once; `tensor` belongs to the group until it has been waited for.

    Returns:
        `tensor`.

    Raises:
        ConfigError: `tensor` is on another device than the session, or there is no rank `src`.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = _check(tensor)
    _check_rank("src", src, here)
    flat, copy_back = _flat(tensor)

    def finish() -> Tensor:
        copy_back()
        return tensor

    return _run(here, "broadcast", [flat], partial(_NATIVE.broadcast, flat, src, here.group), finish, async_op)


@overload
def all_gather(tensor: Tensor, *, same_shape: bool = ..., async_op: Literal[False] = ...) -> list[Tensor]: ...
@overload
def all_gather(tensor: Tensor, *, same_shape: bool = ..., async_op: Literal[True]) -> Work[list[Tensor]]: ...
def all_gather(tensor: Tensor, *, same_shape: bool = False, async_op: bool = False) -> list[Tensor] | Work[list[Tensor]]:
    """Gives every rank the tensors of all ranks, by rank.

    Collective: all ranks call it in the same order, with one dtype and shapes that may differ in the first dimension.

    Args:
        tensor: of any dtype and shape.
        same_shape: True promises that all ranks give one and the same shape, which spares an exchange of shapes, and on a GPU makes the host
            wait for nothing. A broken promise is not noticed.
        async_op: return a `Work` as soon as the shapes are known; `tensor` belongs to the group until it has been waited for.

    Returns:
        One tensor a rank: views of one buffer, which belongs to the caller.

    Raises:
        ConfigError: `tensor` is on another device than the session.
        CollectiveMismatch: dtypes, or dimensions after the first, differ.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = _check(tensor)
    flat, _ = _flat(tensor)

    def begin() -> tuple[Callable[..., Begun], Callable[[], list[Tensor]]]:
        shapes = [tensor.shape] * here.world_size if same_shape else _exchange_shapes(tensor, here)
        sizes = [shape.numel() for shape in shapes]
        sent = torch.nn.functional.pad(flat, (0, max(sizes) - flat.numel())) if max(sizes) > flat.numel() else flat
        received = flat.new_empty(here.world_size, max(sizes))
        start = partial(_NATIVE.all_gather, received.view(-1), sent, here.group)
        return start, lambda: [part[:size].view(shape) for part, size, shape in zip(received, sizes, shapes, strict=True)]

    return _run_planned(here, "all_gather", [flat], begin, async_op)


@overload
def reduce_scatter(tensor: Tensor, op: ReduceOp = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def reduce_scatter(tensor: Tensor, op: ReduceOp = ..., *, async_op: Literal[True]) -> Work: ...
def reduce_scatter(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False) -> Tensor | Work:
    """Combines `tensor` over all ranks and leaves each rank its chunk of the result.

    Collective: all ranks call it in the same order with one shape, dtype and op.

    Args:
        tensor: at least one dimension; the first is cut as by `torch.tensor_split`: the first chunks are one longer when it does not divide.
            Kept.
        op: as in `all_reduce`.
        async_op: return a `Work` at once; `tensor` belongs to the group until it has been waited for.

    Returns:
        This rank's chunk, `[rows of this rank, ...]`.

    Raises:
        ConfigError: as in `all_reduce`; or `tensor` has no dimension.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = _check(tensor)
    op = ReduceOp(op)
    check_reducible(tensor.dtype, op)
    if tensor.dim() == 0:
        raise ConfigError("reduce_scatter cuts the first dimension of a tensor, but this one has none; use all_reduce")
    chunks = tensor.detach().tensor_split(here.world_size)
    rows = chunks[0].size(0)
    sent = _equal_chunks(tensor.detach(), chunks, rows)
    received = sent.new_empty(rows, *tensor.shape[1:])
    torch_op = ReduceOp.SUM if op is ReduceOp.MEAN else op

    def finish() -> Tensor:
        mine = received[: chunks[here.rank].size(0)]
        return mine.div_(here.world_size) if op is ReduceOp.MEAN else mine

    start = partial(_NATIVE.reduce_scatter, received.view(-1), sent.view(-1), torch_op, here.group)
    return _run(here, "reduce_scatter", [sent], start, finish, async_op)


@overload
def all_to_all(tensors: Sequence[Tensor], *, async_op: Literal[False] = ...) -> list[Tensor]: ...
@overload
def all_to_all(tensors: Sequence[Tensor], *, async_op: Literal[True]) -> Work[list[Tensor]]: ...
def all_to_all(tensors: Sequence[Tensor], *, async_op: bool = False) -> list[Tensor] | Work[list[Tensor]]:
    """Sends `tensors[r]` to rank `r`, from every rank.

    Collective: all ranks call it in the same order, with one dtype; shapes are free.

    Args:
        tensors: one a rank.
        async_op: return a `Work` as soon as the shapes are known; the tensors belong to the group until it has been waited for.

    Returns:
        What this rank was sent, by sender: views of one buffer, which belongs to the caller.

    Raises:
        ConfigError: there is not one tensor a rank, or they differ in dtype, or are on another device than the session.
        CollectiveMismatch: dtypes differ between ranks.
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = _check(*tensors)
    if len(tensors) != here.world_size or len({tensor.dtype for tensor in tensors}) != 1:
        raise ConfigError(
            f"all_to_all takes {here.world_size} tensors of one dtype, one a rank, but got {[str(tensor.dtype) for tensor in tensors]}"
        )
    sent = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def begin() -> tuple[Callable[..., Begun], Callable[[], list[Tensor]]]:
        shapes = _swap_shapes(tensors, here)
        sizes = [shape.numel() for shape in shapes]
        received = sent.new_empty(sum(sizes))
        start = partial(_NATIVE.all_to_all, received, sent, sizes, [tensor.numel() for tensor in tensors], here.group)
        return start, lambda: [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]

    return _run_planned(here, "all_to_all", [sent], begin, async_op)


def send(tensor: Tensor, dst: int, *, tag: int = 0) -> None:
    """Sends `tensor` to rank `dst`, which must call `recv`; returns when `tensor` may be overwritten.

    It may wait until `dst` receives: ranks that all send before they receive wait for each other.

    Args:
        tensor: of any dtype.
        dst: another rank.
        tag: number by which `recv` tells messages apart; ignored by NCCL, where messages arrive in order.

    Raises:
        ConfigError: `tensor` is on another device than the session, or there is no other rank `dst`.
        CollectiveTimeout: `dst` did not receive in time.
        PeerLost: `dst` is gone.
    """
    here = _check(tensor)
    _check_peer("dst", dst, here)
    flat, _ = _flat(tensor)
    call = here.progress.begin("send", [flat], peer=dst)
    try:
        dist.send(flat.view(torch.uint8), dst, tag=tag)
    except RuntimeError as error:
        raise here.progress.explain(call, error) from error
    here.progress.end(call)


def recv(tensor: Tensor, src: int, *, tag: int = 0) -> Tensor:
    """Receives into `tensor` what rank `src` sends.

    Args:
        tensor: overwritten; of the shape and dtype that is sent.
        src: another rank.
        tag: as given to `send`.

    Returns:
        `tensor`.

    Raises:
        ConfigError: `tensor` is on another device than the session, or there is no other rank `src`.
        CollectiveTimeout: `src` did not send in time.
        PeerLost: `src` is gone.
    """
    here = _check(tensor)
    _check_peer("src", src, here)
    flat, copy_back = _flat(tensor)
    call = here.progress.begin("recv", [flat], peer=src)
    try:
        dist.recv(flat.view(torch.uint8), src, tag=tag)
    except RuntimeError as error:
        raise here.progress.explain(call, error) from error
    copy_back()
    here.progress.end(call)
    return tensor


def barrier() -> None:
    """Returns when all ranks have called it; on a GPU, when all have also done what they had begun before.

    Collective: all ranks call it.

    Raises:
        CollectiveTimeout, PeerLost: as in `all_reduce`.
    """
    here = session()
    token = torch.zeros(1, dtype=torch.int32, device=here.device)
    start = partial(_NATIVE.all_reduce, token, ReduceOp.SUM, here.group)
    # Reading the value makes the host wait for the device.
    _run(here, "barrier", [], start, token.item, False)


def _run(
    here: Session,
    kind: str,
    tensors: Sequence[Tensor],
    start: Callable[..., Begun],
    finish: Callable[[], _Result],
    async_op: bool,
) -> _Result | Work[_Result]:
    """Begins a collective; its result, or with `async_op` the handle of it."""
    return _run_planned(here, kind, tensors, lambda: (start, finish), async_op)


def _run_planned(
    here: Session,
    kind: str,
    tensors: Sequence[Tensor],
    begin: Callable[[], tuple[Callable[..., Begun], Callable[[], _Result]]],
    async_op: bool,
) -> _Result | Work[_Result]:
    """As `_run`, for a collective that ranks must talk about (`begin`) before it can start."""
    call = here.progress.begin(kind, tensors)
    try:
        start, finish = begin()
        begun = start(async_op=async_op)
    except RuntimeError as error:
        raise here.progress.explain(call, error) from error
    work = Work(begun, call, here.progress, finish)
    return work if async_op else work.wait()


def _check(*tensors: Tensor) -> Session:
    """The session, if it can move `tensors`."""
    here = session()
    for tensor in tensors:
        if tensor.device.type != here.device.type:
            raise ConfigError(f"the tensor must be on {here.device}, but is on {tensor.device}; move it with tensor.to(hora.device())")
        if tensor.layout != torch.strided:
            raise ConfigError(f"the tensor must be dense, but is {tensor.layout}; convert it with to_dense(), or send its parts")
    return here


def _check_rank(name: str, rank: int, here: Session) -> None:
    if not 0 <= rank < here.world_size:
        raise ConfigError(f"{name} must be a rank from 0 to {here.world_size - 1}, but is {rank} instead")


def _check_peer(name: str, rank: int, here: Session) -> None:
    _check_rank(name, rank, here)
    if rank == here.rank:
        raise ConfigError(f"{name} must be another rank, but this is rank {rank} itself")


def _flat(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """`tensor` in one dimension and without gradient, and what to do to bring a result in it back: nothing where it shares memory."""
    plain = tensor.detach()
    if plain.is_contiguous():
        # Not view(-1): a tensor of one element counts as contiguous whatever its stride, and would keep it.
        return plain.as_strided((plain.numel(),), (1,)), _nothing
    flat = plain.contiguous().view(-1)
    return flat, lambda: plain.copy_(flat.view(plain.shape))


def _nothing() -> None:
    """There is nothing to do."""


def _equal_chunks(tensor: Tensor, chunks: Sequence[Tensor], rows: int) -> Tensor:
    """`tensor` with each of its `chunks` filled up to `rows` rows: backends know only parts of one size."""
    if tensor.size(0) == rows * len(chunks):
        return tensor.contiguous()
    padded = tensor.new_zeros(len(chunks), rows, *tensor.shape[1:])
    for part, chunk in zip(padded, chunks, strict=True):
        part[: chunk.size(0)] = chunk
    return padded


def _exchange_shapes(tensor: Tensor, here: Session) -> list[torch.Size]:
    """The shape of every rank's tensor; refuses those that differ in more than the first dimension."""
    mine = torch.tensor(_header(tensor), device=here.device)
    headers = mine.new_empty(here.world_size * _HEADER_LENGTH)
    _finish(_NATIVE.all_gather(headers, mine, here.group, async_op=False))
    described = [_read_header(row) for row in headers.view(-1, _HEADER_LENGTH).tolist()]
    _refuse_mixture([(dtype, shape[1:], len(shape)) for dtype, shape in described], described)
    return [shape for _, shape in described]


def _swap_shapes(tensors: Sequence[Tensor], here: Session) -> list[torch.Size]:
    """The shapes of what each rank is about to send to this one."""
    sent = torch.tensor([_header(tensor) for tensor in tensors], device=here.device).view(-1)
    received = torch.empty_like(sent)
    lengths = [_HEADER_LENGTH] * here.world_size
    _finish(_NATIVE.all_to_all(received, sent, lengths, lengths, here.group, async_op=False))
    described = [_read_header(row) for row in received.view(-1, _HEADER_LENGTH).tolist()]
    _refuse_mixture([dtype for dtype, _ in described], described)
    return [shape for _, shape in described]


def _finish(begun: Begun) -> None:
    for work in begun:
        work.wait()


def _header(tensor: Tensor) -> list[int]:
    if tensor.dim() > _MAX_DIMENSIONS:
        raise ConfigError(f"a tensor must have at most {_MAX_DIMENSIONS} dimensions to be gathered, but has {tensor.dim()}; flatten it")
    rest = [0] * (_MAX_DIMENSIONS - tensor.dim())
    return [list(DTYPES.values()).index(tensor.dtype), tensor.dim(), *tensor.shape, *rest]


def _read_header(row: Sequence[int]) -> tuple[torch.dtype, torch.Size]:
    return list(DTYPES.values())[row[0]], torch.Size(row[2 : 2 + row[1]])


def _refuse_mixture(kinds: Sequence[object], described: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
    if len(set(kinds)) > 1:
        listing = ", ".join(f"{dtype} {list(shape)} from rank {rank}" for rank, (dtype, shape) in enumerate(described))
        raise CollectiveMismatch(
            f"tensors must have one dtype, and to be gathered one shape after the first dimension, but came as {listing}"
        )
