"""The same beginning on all ranks: parameters, optimizer state and objects of one rank for everybody."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import hora
from hora import env
from hora.comm.objects import MAX_OBJECT_BYTES
from hora.comm.parcel import Letter, Parcel, Refusal, pack_or_refuse
from hora.errors import ConfigError
from hora.hvd import asynchronous, pickled, state
from hora.hvd.basics import rank
from hora.hvd.exceptions import WrongType, brief
from hora.hvd.handles import synchronize
from hora.hvd.process_sets import ProcessSet, global_process_set


@brief
@torch.no_grad()
def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Gives every rank the tensors of `root_rank`, in place.

    Collective: by name.

    Args:
        params: a `state_dict()`, `named_parameters()`, or a list of tensors.
        root_rank: whose values count.

    Raises:
        ValueError: `params` is something else.
    """
    pairs = _named(params)
    waiting = []
    for name, tensor in pairs:
        sent = tensor.detach()
        dense = sent if sent.is_contiguous() else sent.contiguous()
        waiting.append((sent, dense, asynchronous.broadcast_async_(dense, root_rank, name)))
    for tensor, dense, handle in waiting:
        synchronize(handle)
        if dense is not tensor:
            tensor.copy_(dense)


def _named(params: Any) -> list[tuple[str | None, Tensor]]:
    if isinstance(params, Mapping):
        found = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str):
        found = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ConfigError(f"invalid params of type: {type(params)}")
    for name, tensor in found:
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"invalid params of type: {name!r} is a {type(tensor).__name__}, not a tensor; use broadcast_object for it")
    return found


@brief
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001 (Horovod's, for its step)
) -> None:
    """Gives every rank the optimizer's state and settings of `root_rank`; takes no step to do so.

    Collective: all ranks call it in one order with other calls of this kind.

    Raises:
        ValueError: the optimizer is an LBFGS.
        TypeError: it is none.
    """
    require_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("cannot broadcast torch.optim.LBFGS state")
    state.current()
    hora.broadcast_optimizer_state(optimizer, root_rank)


def require_optimizer(optimizer: object) -> None:
    """Refuses what is no optimizer.

    Raises:
        WrongType: says what was given.
    """
    if not hasattr(optimizer, "param_groups"):
        raise WrongType(f"optimizer must be a torch.optim.Optimizer, but is a {type(optimizer).__name__} instead: {str(optimizer)[:60]}")


@brief
def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Gives every rank the object of `root_rank`: what `hora.broadcast_object` can send, and with HORA_HVD_ALLOW_PICKLE=1 what pickle can.

    Collective: by name.

    Returns:
        A copy; on `root_rank` the object itself.

    Raises:
        ConfigError: on all ranks: the object cannot be sent.
    """
    mine = rank() == root_rank
    letter = _pack(obj) if mine else torch.empty(0, dtype=torch.uint8, device="cpu")
    found = synchronize(asynchronous.allgather_async(letter, f"broadcast_object.{name}" if name else None, process_set))
    copy = _open(found, root_rank)
    return obj if mine else copy


@brief
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, by rank; see `broadcast_object`. Collective: by name."""
    letter = _pack(obj)
    tensors = [torch.tensor([letter.numel()], device="cpu"), letter]
    named = f"allgather_object.{name}" if name else None
    sizes, letters = synchronize(asynchronous.grouped_allgather_async(tensors, named, process_set))
    ranks = process_set.ranks or []
    return [_open(part, rank) for part, rank in zip(letters.split(sizes.tolist()), ranks, strict=True)]


def _pack(obj: Any) -> Tensor:
    packed = pack_or_refuse(lambda: Parcel.pack(obj, MAX_OBJECT_BYTES))
    if isinstance(packed, Refusal) and pickled.is_allowed():
        packed = pack_or_refuse(lambda: Parcel.pack(pickled.wrap(obj), MAX_OBJECT_BYTES))
    return packed.letter(MAX_OBJECT_BYTES)


def _open(content: Tensor, sender: int) -> Any:
    letter = Letter(content)
    if letter.refusal is not None:
        raise ConfigError(
            f"rank {sender} cannot send its object: {letter.refusal}. Objects that are no plain data can be sent by pickle, where you trust all "
            f"ranks: set {env.HVD_ALLOW_PICKLE}=1"
        )
    tree = letter.open(state.current().session.device)
    return pickled.unwrap(tree) if pickled.is_wrapped(tree) else tree
