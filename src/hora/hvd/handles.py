"""Handles: numbers for operations under way, as Horovod's scripts keep them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hora.comm.dtypes import DTYPES, dtype_name
from hora.comm.reduce_op import REDUCIBLE_DTYPES
from hora.errors import ConfigError
from hora.hvd import state
from hora.hvd.engine.entry import Entry
from hora.hvd.exceptions import HorovodInternalError, brief
from hora.hvd.negotiation.request import Kind, Part, Reduction, Request
from hora.hvd.process_sets import ProcessSet, require_set

Handle = int

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COMBINED = REDUCIBLE_DTYPES | {torch.int16}


def submit(
    kind: Kind,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[Any], Any],
    outputs: Sequence[Tensor] | None = None,
    **what: Any,
) -> Handle:
    """Gives the engine an operation; `finish` makes of the engine's result what the caller is to get.

    Raises:
        ValueError: a tensor is not contiguous or of a type that cannot be sent, the process set is not known or this rank not in it, or an
            operation of this name is under way.
        HorovodInternalError: the world has been shut down.
    """
    here = state.current()
    set_id = _set_id(here, process_set, kind)
    parts = tuple(_describe(tensor) for tensor in tensors)
    device = tensors[0].device.type if tensors else "cpu"
    if len(tensors) > 1 and any(tensor.device.type != device for tensor in tensors):
        raise ConfigError(f"tensors of one group must be on one kind of device, but are on {sorted({t.device.type for t in tensors})}")
    request = Request(kind, here.name_for(kind, name, set_id), set_id, parts, device, **what)
    entry = Entry(request, tensors, outputs)
    here.engine.give(entry)
    handle = here.next_handle()
    here.handles[handle] = (entry, finish)
    return handle


def poll(handle: Handle) -> bool:
    """Whether the operation is done, so that `synchronize` will not wait; True too for one that is not known any more."""
    here = state.current()
    if handle not in here.handles:
        return True
    entry, _ = here.handles[handle]
    if not entry.done:
        here.engine.hurry()
    return entry.is_complete


@brief
def synchronize(handle: Handle | Callable[[], Any]) -> Any:
    """Waits for an operation and returns its result; None for one that is not known any more.

    Raises:
        HorovodInternalError: it could not be done; names the ranks and the tensor.
    """
    if callable(handle):
        return handle()
    here = state.current()
    found = here.handles.pop(handle, None)
    if found is None:
        return None
    entry, finish = found
    return finish(here.engine.wait(entry))


def plain(tensor: Tensor) -> Tensor:
    """`tensor` without its gradient; torch is asked only where there is one, for that lets another thread run."""
    return tensor.detach() if tensor.requires_grad else tensor


def first(results: Sequence[Any]) -> Any:
    """The one result of an operation on one tensor."""
    return results[0]


def require_combinable(tensors: Sequence[Tensor], op: int) -> None:
    """Refuses what cannot be combined by `op`.

    Raises:
        ValueError: says which type.
    """
    for tensor in tensors:
        if tensor.dtype not in _COMBINED:
            raise ConfigError(f"Tensor type {tensor.type()} is not supported.")
        if tensor.dtype is torch.bool and op in (Reduction.AVERAGE, Reduction.ADASUM):
            raise ConfigError("Tensor type torch.BoolTensor has no average; take op=hvd.Sum or hvd.Max for 'any', hvd.Min for 'all'")
        if op == Reduction.ADASUM and not tensor.is_floating_point():
            raise ConfigError(f"Adasum takes floating-point tensors, but got {tensor.type()}")


def _describe(tensor: Tensor) -> Part:
    if tensor.layout != torch.strided:
        raise ConfigError(f"Tensor is required to be dense, but is {tensor.layout}; use sparse_allreduce_async, or to_dense()")
    if not tensor.is_contiguous():
        raise ConfigError("Tensor is required to be contiguous.")
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise ConfigError(f"Tensor type {dtype_name(tensor.dtype)} is not supported.")
    return Part(name, tuple(tensor.shape))


def _set_id(here: state.State, process_set: ProcessSet, kind: Kind) -> int:
    require_set(process_set)
    set_id = process_set.process_set_id
    if set_id is None or set_id not in here.sets:
        raise HorovodInternalError(f"{kind.capitalize()}: Process set provided does not exist, or has not been registered.")
    if set_id and here.session.rank not in (process_set.ranks or ()):
        raise HorovodInternalError(f"{kind.capitalize()}: Rank {here.session.rank} is not a member of the provided process set.")
    return set_id
