"""The operations that return at once; those that wait and take part in autograd are in `operations`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hora.errors import ConfigError
from hora.hvd import state
from hora.hvd.exceptions import brief
from hora.hvd.handles import Handle, first, plain, submit, synchronize
from hora.hvd.negotiation.request import Kind, Reduction
from hora.hvd.process_sets import ProcessSet, global_process_set, require_set
from hora.hvd.submitting import as_group, choose_op, read_splits, reduce, require_rows, require_sparse, require_tensors, scatter, spread

Average, Sum, Adasum, Min, Max, Product = (int(op) for op in Reduction)

_PAIR = ("indices", "values")


@brief
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins to combine `tensor` over the ranks of `process_set`; `synchronize` gives a new tensor.

    Collective: by name. All ranks of the set call it with one shape, type, `op` and factors.

    Args:
        tensor: contiguous; kept, and the engine's until the operation is done.
        average: as Horovod had it before `op`; deprecated.
        name: by which the ranks meet; without one they meet in the order of their calls without names.
        op: Average (the default), Sum, Adasum, Min, Max, Product. An average of integers is cut towards zero. Of bool Sum and Max are "any", Min and
            Product "all".
        prescale_factor: the tensor is multiplied by it before.
        postscale_factor: the result is multiplied by it.
        process_set: who takes part.

    Raises:
        ValueError: the tensor is of a type that cannot be combined so, or not contiguous; `op` and `average` are both given; an operation of this
            name is under way.
    """
    require_tensors("allreduce_async", tensor)
    op = choose_op(op, average)
    factors = prescale_factor, postscale_factor
    return reduce([tensor], [torch.empty_like(tensor)], name, op, *factors, process_set, first)


@brief
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `allreduce_async`, in place: `synchronize` gives `tensor`."""
    require_tensors("allreduce_async_", tensor)
    op = choose_op(op, average)
    return reduce([tensor], None, name, op, prescale_factor, postscale_factor, process_set, lambda _: tensor)


@brief
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `allreduce_async`, of tensors that begin together; `synchronize` gives a list."""
    tensors = as_group("grouped_allreduce_async", tensors)
    op = choose_op(op, average)
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    return reduce(tensors, outputs, name, op, prescale_factor, postscale_factor, process_set, list)


@brief
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `grouped_allreduce_async`, in place."""
    tensors = as_group("grouped_allreduce_async_", tensors)
    op = choose_op(op, average)
    return reduce(tensors, None, name, op, prescale_factor, postscale_factor, process_set, lambda _: tensors)


@dataclass(frozen=True)
class SparseSum:
    """A sum of sparse tensors that is under way.

    Attributes:
        indices: the operation that gathers them.
        values: the same of the values.
        divisor: by which these are divided; None: they are summed.
        shape: of the sum.
    """

    indices: Handle
    values: Handle
    divisor: int | None
    shape: torch.Size

    def __call__(self) -> Tensor:
        """Waits, and returns the sum."""
        values, rows = synchronize(self.values), synchronize(self.indices)
        if self.divisor is not None:
            values = values / self.divisor
        result: Tensor = torch.sparse_coo_tensor(rows.t(), values, self.shape, check_invariants=False, device=values.device).coalesce()
        return result


@brief
def sparse_allreduce_async(tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set) -> SparseSum:
    """Begins to add up sparse tensors: their indices and values are gathered. Call what it returns to wait for the sum.

    Collective: by name.
    """
    require_sparse("sparse_allreduce_async", tensor)
    require_set(process_set)
    if op not in (Average, Sum):
        raise ConfigError(f"sparse tensors can be averaged or summed, but op is {op}")
    sparse = tensor.coalesce()
    divisor = process_set.size() if op == Average else None
    names = [None if name is None else f"{name}.{part}" for part in _PAIR]
    indices = allgather_async(sparse.indices().t().contiguous(), name=names[0], process_set=process_set)
    values = allgather_async(sparse.values().contiguous(), name=names[1], process_set=process_set)
    return SparseSum(indices, values, divisor, tensor.shape)


@brief
def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begins to put the tensors of all ranks behind one another, in their first dimension, which may differ.

    Collective: by name.

    Raises:
        IndexError: `tensor` has no dimension.
    """
    require_tensors("allgather_async", tensor)
    require_rows("allgather", [tensor])
    return submit(Kind.ALLGATHER, [plain(tensor)], name, process_set, first)


@brief
def grouped_allgather_async(tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """As `allgather_async`, of tensors that begin together; `synchronize` gives a list."""
    tensors = as_group("grouped_allgather_async", tensors)
    require_rows("allgather", tensors)
    return submit(Kind.ALLGATHER, [plain(tensor) for tensor in tensors], name, process_set, list)


@brief
def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begins to give every rank the tensor of `root_rank` (its number in the world); `synchronize` gives a new tensor.

    Collective: by name.

    Raises:
        ValueError: `root_rank` is not in the process set.
    """
    require_tensors("broadcast_async", tensor)
    return spread(tensor, [torch.empty_like(tensor)], root_rank, name, process_set, first)


@brief
def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """As `broadcast_async`, in place."""
    require_tensors("broadcast_async_", tensor)
    return spread(tensor, None, root_rank, name, process_set, lambda _: tensor)


@brief
def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins to send rows of `tensor` to every rank: `splits[r]` of them to rank r, or equally many.

    Collective: by name. The result is (what was received, how many rows of each rank: int32).

    Raises:
        ValueError: `splits` does not fit.
    """
    require_tensors("alltoall_async", tensor)
    require_rows("alltoall", [tensor])
    require_set(process_set)
    size, rows = process_set.size(), tensor.size(0)
    if splits is None:
        if rows % size:
            raise ConfigError("splits not provided, but first dimension of tensor is not an even multiple of the number of workers.")
        return submit(Kind.ALLTOALL, [plain(tensor)], name, process_set, tuple)
    counts = read_splits(splits, size, rows)
    sent = plain(tensor)[: sum(counts)]
    return submit(Kind.ALLTOALL, [sent], name, process_set, tuple, splits=counts)


@brief
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins to combine `tensor` and to leave each rank its rows of the result; what is left over goes to the first ranks.

    Collective: by name.

    Raises:
        ValueError: `tensor` has no dimension, or a type that cannot be combined.
        HorovodInternalError: `op` is not Average or Sum.
    """
    require_tensors("reducescatter_async", tensor)
    return scatter([tensor], name, op, process_set, prescale_factor, postscale_factor, first)


@brief
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `reducescatter_async`, of tensors that begin together; `synchronize` gives a list."""
    tensors = as_group("grouped_reducescatter_async", tensors)
    return scatter(tensors, name, op, process_set, prescale_factor, postscale_factor, list)


@brief
def join(device: int = -1) -> int:  # noqa: ARG001 (Horovod's)
    """Says that this rank has no more data, and waits until all say so; meanwhile it takes part in every allreduce with zeros.

    Collective. Averages divide by the number of all ranks, joined or not. Other operations fail on the ranks that call them meanwhile.

    Returns:
        The rank that came last.
    """
    handle = submit(Kind.JOIN, [], "join", global_process_set, int)
    last = int(synchronize(handle))
    state.current().restart_names()
    return last


@brief
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks of `process_set` have called it. Collective: by how many there were before."""
    synchronize(submit(Kind.BARRIER, [], None, process_set, lambda _: None))
