"""Keys that tell the rows of input tensors apart: two projections of each, in float64 or, for whole numbers, in integers modulo 2^64.

Rows are compared between runs by these keys, in whatever order and on whatever rank they come. Keys are taken along dimensions 0 and 1,
for data with time first.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hora.diag.prove.records import Rows


def rows_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Rows, ...]:
    """The rows of every tensor found in the arguments of a forward that needs no gradient: what comes from the data, not from the model."""
    return tuple(
        Rows(slot, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), _keys(tensor))
        for slot, tensor in find_tensors([*args], dict(kwargs))
        if not tensor.requires_grad and tensor.dim() > 0 and tensor.numel() > 0
    )


def find_tensors(*values: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in lists, tuples, mappings and dataclasses, with the way to each."""
    for value in values:
        if isinstance(value, Tensor):
            yield path or "0", value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from find_tensors(item, path=f"{path}.{key}" if path else str(key))
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from find_tensors(item, path=f"{path}.{number}" if path else str(number))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from find_tensors(getattr(value, field.name), path=f"{path}.{field.name}" if path else field.name)


def _keys(tensor: Tensor) -> tuple[Any, ...]:
    tensor = (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = (tensor.double() if tensor.is_floating_point() else tensor.long()).cpu()
    ways = (tensor,) if tensor.dim() == 1 else (tensor, tensor.transpose(0, 1))
    return tuple(_project(way.reshape(len(way), -1)).numpy() for way in ways)


def _project(matrix: Tensor) -> Tensor:
    """Two numbers a row. The sums of integers wrap around, in any order alike."""
    weights = _weights(matrix.shape[1], matrix.dtype)
    return torch.stack([(matrix * weight).sum(1) for weight in weights], 1)


@cache
def _weights(size: int, dtype: torch.dtype) -> Tensor:
    """Fixed pseudo-random weights `[2, size]`; odd for integers. A generator of its own: the script's random numbers stay where they are.

    Those of a longer row begin with those of a shorter one, so that zeros at the end change nothing.
    """
    generator = torch.Generator().manual_seed(1)
    if dtype == torch.float64:
        return (torch.rand(size, 2, generator=generator, dtype=dtype) + 0.5).t().contiguous()
    return (torch.randint(2**62, (size, 2), generator=generator) * 2 + 1).t().contiguous()
