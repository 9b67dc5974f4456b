"""Same beginning, same gradients: rank 0's parameters and optimizer state for everybody, and a plain average of gradients.

These are the calls of hand-written loops. `DistributedOptimizer` makes the first two by itself and replaces the third.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hora.comm.codec import Tree, decode, encode
from hora.comm.collectives import all_reduce, broadcast
from hora.comm.dealt_out import require_whole
from hora.comm.dtypes import DTYPES, dtype_name
from hora.comm.objects import broadcast_object
from hora.comm.session import session
from hora.errors import ConfigError
from hora.sync.gradients import GradientBucket, divide_all

_PIECE_BYTES = 32 * 2**20


@torch.no_grad()
def broadcast_parameters(source: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], src: int = 0) -> None:
    """Gives every rank the parameters and buffers of rank `src`.

    Collective: all ranks pass the same names and shapes in the same order. Tensors are sent together in pieces of 32 MiB.

    Args:
        source: a module (its parameters and buffers, tied ones once), a state_dict, or pairs of name and tensor. Overwritten in place.
        src: the rank whose values count.

    Raises:
        ConfigError: a tensor is one of which each rank has a part (`fully_shard`).
    """
    named = list(_named_tensors(source))
    require_whole(named, "broadcast_parameters gives every rank the same")
    for piece in _pieces([tensor for _, tensor in named]):
        flat = torch.cat([tensor.reshape(-1) for tensor in piece])
        broadcast(flat, src)
        if session().rank != src:  # there the memory may be one that must not be written, such as that of bytes
            for tensor, part in zip(piece, flat.split([tensor.numel() for tensor in piece]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, src: int = 0) -> None:
    """Gives every rank the state and the parameter groups' settings of rank `src`; takes no optimizer step to do so.

    Collective. A state that rank `src` does not have yet (before its first step) is removed on the others.

    Raises:
        ConfigError: a value in the state is neither a tensor nor plain data; the message says which. A parameter is one of which each rank has a
            part (`fully_shard`).
    """
    here = session()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    require_whole(
        ((f"parameter {n}", parameter) for n, parameter in enumerate(parameters)), "broadcast_optimizer_state gives every rank the same"
    )
    mine = here.rank == src
    head, tensors = _outline(optimizer.state_dict(), here.device) if mine else (None, {})
    head = broadcast_object(head, src)
    if not mine:
        tensors = {name: torch.empty(shape, dtype=DTYPES[dtype], device=here.device) for name, dtype, shape in head["tensors"]}
    broadcast_parameters(tensors, src)
    if not mine:
        optimizer.load_state_dict(decode(json.loads(head["skeleton"]), {**head["elsewhere"], **tensors}))


@torch.no_grad()
def sync_gradients(module: nn.Module | Iterable[nn.Parameter]) -> None:
    """Replaces every `.grad` by its average over the ranks; a parameter that has none on some ranks counts as zero there.

    Collective. Call it after `loss.backward()` in a loop that keeps its own optimizer; nothing overlaps.
    """
    parameters = list(module.parameters() if isinstance(module, nn.Module) else module)
    require_whole(((f"parameter {n}", parameter) for n, parameter in enumerate(parameters)), "sync_gradients averages whole gradients")
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ConfigError("sync_gradients takes dense gradients; DistributedOptimizer sums sparse ones")
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    world_size = torch.tensor(float(session().world_size), device="cpu")
    for members in kinds.values():
        bucket = GradientBucket(members)
        bucket.pack()
        all_reduce(bucket.buffer)
        divide_all([bucket], world_size)
        bucket.unpack()


def _outline(state: dict[str, Any], device: torch.device) -> tuple[Tree, dict[str, Tensor]]:
    """What is sent of a state as an object, and the tensors that follow: those on `device`, whatever their size."""
    try:
        skeleton, tensors = encode(state)
    except ConfigError:
        return state, {}  # refused on all ranks, when it is to be sent
    here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
    return {
        "skeleton": json.dumps(skeleton),
        "elsewhere": {name: tensor for name, tensor in tensors.items() if name not in here},
        "tensors": [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in here.items()],
    }, here


def _named_tensors(source: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(source, nn.Module):
        yield from ((name, parameter.data) for name, parameter in source.named_parameters())
        yield from source.named_buffers()
    else:
        pairs = source.items() if isinstance(source, Mapping) else source
        yield from ((name, tensor.data) for name, tensor in pairs)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors of one dtype and device, in an order all ranks share, up to the size of a piece."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        group = groups.setdefault((tensor.dtype, tensor.device), [])
        group.append(tensor)
        if sum(t.numel() * t.element_size() for t in group) >= _PIECE_BYTES:
            yield groups.pop((tensor.dtype, tensor.device))
    yield from groups.values()
