"""What several operations have in common on their way to the engine."""

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hora.errors import ConfigError
from hora.hvd import state
from hora.hvd.engine.adasum import is_power_of_two
from hora.hvd.exceptions import HorovodInternalError, NoRows, WrongNumberOfRanks, WrongType
from hora.hvd.handles import Handle, plain, require_combinable, submit
from hora.hvd.negotiation.request import Kind, Reduction
from hora.hvd.process_sets import ProcessSet, require_set

_REDUCTIONS = frozenset(map(int, Reduction))


def choose_op(op: int | None, average: bool | None) -> int:
    """What `op` and the older `average` ask for.

    Raises:
        ValueError: both are given, or there is no such op.
    """
    if op is not None:
        if average is not None:
            raise ConfigError("The op parameter supersedes average. Please provide only one of them.")
        if op not in _REDUCTIONS:
            raise ConfigError(f"op must be one of hvd.Average, Sum, Adasum, Min, Max and Product, but is {op!r} instead")
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
    require_set(process_set)
    if op == Reduction.ADASUM and not is_power_of_two(process_set.size()):
        raise WrongNumberOfRanks(f"Running Adasum with non-power of 2 ranks is not supported yet; there are {process_set.size()}.")
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
    require_set(process_set)
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        state.current()
        raise ConfigError(f"root_rank must be one of the ranks {ranks} of the process set, but is {root_rank} instead")
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
        raise ConfigError("Reducescatter does not support scalar inputs")
    require_combinable(tensors, op)
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return submit(Kind.REDUCESCATTER, [plain(tensor) for tensor in tensors], name, process_set, finish, None, op=op, **factors)


def require_tensors(what: str, *tensors: object) -> None:
    """Refuses what is no tensor.

    Raises:
        WrongType: says what was given.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise WrongType(
                f"hvd.{what} takes tensors, but got a {_say(tensor)}; make one of it (torch.tensor), or send any object with hvd.broadcast_object "
                "or hvd.allgather_object"
            )


def as_group(what: str, tensors: object) -> list[Tensor]:
    """The tensors of one group as a list.

    Raises:
        WrongType: there is no list of them, or something else is in it.
    """
    if not isinstance(tensors, Iterable) or isinstance(tensors, Mapping | str | bytes):
        raise WrongType(f"hvd.{what} takes a list of tensors, but got a {_say(tensors)}; put the tensors into a list")
    group = list(tensors)
    require_tensors(what, *group)
    return group


def require_sparse(what: str, tensor: object) -> None:
    """Refuses what is no sparse tensor of indices and values.

    Raises:
        WrongType: says what was given.
    """
    require_tensors(what, tensor)
    if tensor.layout != torch.sparse_coo:  # type: ignore[attr-defined]
        raise WrongType(f"hvd.{what} takes a sparse tensor, but got one of layout {tensor.layout}; use hvd.allreduce for it")  # type: ignore[attr-defined]


def read_splits(splits: Tensor | Sequence[int], size: int, rows: int) -> tuple[int, ...]:
    """How many of so many rows go to each of so many ranks.

    Raises:
        ConfigError: they do not fit.
        WrongType: they are no whole numbers.
    """
    if isinstance(splits, Tensor) and splits.dtype is not torch.int32:
        raise ConfigError("alltoall expects splits to contain 32-bit integer elements.")
    try:
        counts = tuple(map(operator.index, splits))
    except TypeError as error:
        raise WrongType(f"splits must be a list of whole numbers or a tensor of int32, but got a {_say(splits)}") from error
    if len(counts) != size:
        raise ConfigError(f"Number of entries in splits must be equal to the number of workers: {size}, but there are {len(counts)}.")
    if min(counts) < 0:
        raise ConfigError("splits must not be negative.")
    if sum(counts) > rows:
        raise ConfigError("Sum of splits entries is greater than the first dimension of tensor.")
    return counts


def require_rows(what: str, tensors: Sequence[Tensor]) -> None:
    """Refuses tensors without rows.

    Raises:
        NoRows: one has no dimension.
    """
    if any(tensor.dim() == 0 for tensor in tensors):
        raise NoRows(f"{what} puts rows behind one another, but a tensor has no dimension; use tensor.reshape(1)")


def _say(given: object) -> str:
    return f"{type(given).__name__}: {str(given)[:60]}"
