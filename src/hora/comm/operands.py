"""What collectives are given: whether the session can move it, and the flat contiguous form in which backends want it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hora.comm.dealt_out import as_dtensor
from hora.comm.members import Members
from hora.comm.session import Session, session
from hora.comm.subgroups import Subgroup
from hora.errors import ConfigError


def members_for(group: Subgroup | None, *tensors: Tensor) -> Members:
    """Those who make the call: `group`, or all ranks of the session in force, if it can move `tensors`.

    Raises:
        ConfigError: as `session_for`; or this rank is not in the group, or the group is of a session that has ended.
    """
    here = session_for(*tensors)
    if group is None:
        return here
    if group.session is not here:
        raise ConfigError("a group ends with its session, and this one's has ended; call new_group again")
    group.require_member()
    return group


def session_for(*tensors: Tensor) -> Session:
    """The session in force, if it can move `tensors`.

    Raises:
        ConfigError: one of them is on another kind of device, or not dense, or a part of one that is dealt out.
    """
    here = session()
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"collectives take tensors, but got {type(tensor).__name__}; for other values there is hora.all_gather_object and its kin"
            )
        if tensor.device.type != here.device.type:
            raise ConfigError(f"the tensor must be on {here.device}, but is on {tensor.device}; move it with tensor.to(hora.device())")
        if as_dtensor(tensor) is not None:
            raise ConfigError(
                "the tensor must be whole, but is a DTensor, of which each rank has a part; send tensor.to_local() or tensor.full_tensor()"
            )
        if tensor.layout != torch.strided:
            raise ConfigError(f"the tensor must be dense, but is {tensor.layout}; convert it with to_dense(), or send its parts")
    return here


def check_rank(name: str, rank: int, here: Members) -> None:
    """Refuses what is no rank."""
    if not isinstance(rank, int) or not 0 <= rank < here.world_size:
        raise ConfigError(f"{name} must be a rank from 0 to {here.world_size - 1}, but is {rank} instead")


def flatten(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """`tensor` in one dimension and without gradient, and what to do to bring a result in it back: nothing where it shares memory."""
    plain = tensor.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        # Not view(-1): a tensor of one element counts as contiguous whatever its stride, and would keep it.
        return plain.as_strided((plain.numel(),), (1,)), _nothing
    flat = plain.resolve_conj().resolve_neg().contiguous().view(-1)
    return flat, lambda: plain.copy_(flat.view(plain.shape))


def _nothing() -> None:
    """There is nothing to do."""


def equal_chunks(tensor: Tensor, chunks: Sequence[Tensor], rows: int) -> Tensor:
    """`tensor` with each of its `chunks` filled up to `rows` rows: backends know only parts of one size."""
    if tensor.size(0) == rows * len(chunks):
        return tensor.contiguous()
    padded = tensor.new_zeros(len(chunks), rows, *tensor.shape[1:])
    for part, chunk in zip(padded, chunks, strict=True):
        part[: chunk.size(0)] = chunk
    return padded
