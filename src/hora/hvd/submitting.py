"""What several operations have in common on their way to the engine."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hora.hvd import state
from hora.hvd.engine.adasum import is_power_of_two
from hora.hvd.exceptions import HorovodInternalError
from hora.hvd.handles import Handle, plain, require_combinable, submit
from hora.hvd.negotiation.request import Kind, Reduction
from hora.hvd.process_sets import ProcessSet

_REDUCTIONS = frozenset(map(int, Reduction))


def choose_op(op: int | None, average: bool | None) -> int:
    """What `op` and the older `average` ask for.

    Raises:
        ValueError: both are given, or there is no such op.
    """
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op not in _REDUCTIONS:
            raise ValueError(f"op must be one of hvd.Average, Sum, Adasum, Min, Max and Product, but is {op!r} instead")
        return op
    if average is not None:
        warnings.warn("Parameter `average` has been replaced with `op` and will be removed", DeprecationWarning, stacklevel=4)
        return int(Reduction.AVERAGE if average else Reduction.SUM)
    return int(Reduction.AVERAGE)


def reduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    finish: Callable[[Any], Any],
) -> Handle:
    """Submits a combination of `tensors`, into `outputs` or in place.

    Raises:
        ValueError: their type cannot be combined so, or Adasum does not serve so many ranks; or as `submit`.
    """
    require_combinable(tensors, op)
    if op == Reduction.ADASUM and not is_power_of_two(process_set.size()):
        raise ValueError(f"Running Adasum with non-power of 2 ranks is not supported yet; there are {process_set.size()}.")
    given = [plain(tensor) for tensor in tensors]
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return submit(Kind.ALLREDUCE, given, name, process_set, finish, outputs, op=op, **factors)


def spread(
    tensor: Tensor,
    outputs: Sequence[Tensor] | None,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[Any], Any],
) -> Handle:
    """Submits a broadcast of `tensor`, into `outputs` or in place.

    Raises:
        ValueError: `root_rank` is not in the process set; or as `submit`.
    """
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        state.current()
        raise ValueError(f"root_rank must be one of the ranks {ranks} of the process set, but is {root_rank} instead")
    return submit(Kind.BROADCAST, [plain(tensor)], name, process_set, finish, outputs, root=root_rank)


def scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    finish: Callable[[Any], Any],
) -> Handle:
    """Submits a combination of `tensors`, of which each rank gets rows.

    Raises:
        HorovodInternalError: `op` is not Average or Sum.
        ValueError: a tensor has no dimension, or a type that cannot be combined; or as `submit`.
    """
    if op not in (Reduction.AVERAGE, Reduction.SUM):
        raise HorovodInternalError(f"Reducescatter: only Sum and Average reduce operations are supported, but op is {op}.")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("Reducescatter does not support scalar inputs")
    require_combinable(tensors, op)
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return submit(Kind.REDUCESCATTER, [plain(tensor) for tensor in tensors], name, process_set, finish, None, op=op, **factors)


def require_tensors(what: str, *tensors: object) -> None:
    """Refuses what is no tensor.

    Raises:
        TypeError: says what was given.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"hvd.{what} takes tensors, but got a {type(tensor).__name__}: {str(tensor)[:60]}; make one of it (torch.tensor), or send any "
                "object with hvd.broadcast_object or hvd.allgather_object"
            )


def require_rows(what: str, tensors: Sequence[Tensor]) -> None:
    """Refuses tensors without rows.

    Raises:
        IndexError: one has no dimension.
    """
    if any(tensor.dim() == 0 for tensor in tensors):
        raise IndexError(f"{what} puts rows behind one another, but a tensor has no dimension; use tensor.reshape(1)")
