"""Telling each other the shapes of tensors, before tensors whose shapes differ are exchanged. Makes the host wait for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hora.comm.algorithms import find_algorithm
from hora.comm.dtypes import DTYPES
from hora.comm.members import Members
from hora.errors import CollectiveMismatch, ConfigError

_NATIVE = find_algorithm("native")
_DTYPES = list(DTYPES.values())
# A shape travels as dtype, number of dimensions, dimensions.
_MAX_DIMENSIONS = 14
_HEADER_LENGTH = 2 + _MAX_DIMENSIONS


def exchange_shapes(tensor: Tensor, here: Members) -> list[torch.Size]:
    """The shape of every rank's tensor; refuses those that differ in more than the first dimension."""
    mine = torch.tensor(_header(tensor), device=here.device)
    headers = mine.new_empty(here.world_size * _HEADER_LENGTH)
    _NATIVE.all_gather(headers, mine, here.groups, async_op=False)
    described = [_read_header(row) for row in headers.view(-1, _HEADER_LENGTH).tolist()]
    _refuse_mixture([(dtype, shape[1:], len(shape)) for dtype, shape in described], described)
    return [shape for _, shape in described]


def swap_shapes(tensors: Sequence[Tensor], here: Members) -> list[torch.Size]:
    """The shapes of what each rank is about to send to this one."""
    sent = torch.tensor([_header(tensor) for tensor in tensors], device=here.device).view(-1)
    received = torch.empty_like(sent)
    lengths = [_HEADER_LENGTH] * here.world_size
    _NATIVE.all_to_all(received, sent, lengths, lengths, here.groups, async_op=False)
    described = [_read_header(row) for row in received.view(-1, _HEADER_LENGTH).tolist()]
    _refuse_mixture([dtype for dtype, _ in described], described)
    return [shape for _, shape in described]


def _header(tensor: Tensor) -> list[int]:
    if tensor.dim() > _MAX_DIMENSIONS:
        raise ConfigError(f"a tensor must have at most {_MAX_DIMENSIONS} dimensions to be gathered, but has {tensor.dim()}; flatten it")
    if tensor.dtype not in _DTYPES:
        raise ConfigError(f"tensors of {tensor.dtype} cannot be gathered; send their bytes with tensor.view(torch.uint8)")
    rest = [0] * (_MAX_DIMENSIONS - tensor.dim())
    return [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *rest]


def _read_header(row: Sequence[int]) -> tuple[torch.dtype, torch.Size]:
    return _DTYPES[row[0]], torch.Size(row[2 : 2 + row[1]])


def _refuse_mixture(kinds: Sequence[object], described: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
    if len(set(kinds)) > 1:
        listing = ", ".join(f"{dtype} {list(shape)} from rank {rank}" for rank, (dtype, shape) in enumerate(described))
        raise CollectiveMismatch(
            f"tensors must have one dtype, and to be gathered one shape after the first dimension, but came as {listing}"
        )
