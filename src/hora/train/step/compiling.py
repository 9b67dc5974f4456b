"""What `compile` gives to torch.compile: the whole model, at once or in a few parts, or its repeated blocks.

The whole computes fastest, takes longest to compile, and hands over all gradients at once when backward ends. Parts of it hand over theirs one after
the other, so that these travel during backward; where they begin depends on the model alone, and not on the ranks. So do blocks (layers of a
ModuleList or Sequential), which are compiled once for all that are alike: PyTorch calls that regional compilation.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn

from hora.comm.torch_private import compile_in_parts
from hora.errors import ConfigError

Compile = bool | Literal["parts", "regions"]

_NUM_PARTS: Final = 4

_CONTAINERS = nn.ModuleList, nn.Sequential


def compiled(model: nn.Module, how: Compile) -> Any:
    """`model` as it is to be called.

    Raises:
        ConfigError: it has no blocks.
    """
    if how == "regions":
        compile_regions(model)
        return model
    if how == "parts":
        return in_parts(model)
    return torch.compile(model) if how else model


def bytes_at_once(model: nn.Module, how: Compile) -> int | None:
    """Of how many bytes of parameters the gradients come at once; None where they come as without a compiler."""
    return _bytes_in(model) if how is True else _part_bytes(model) if how == "parts" else None


def in_parts(model: nn.Module, backend: str = "inductor") -> Any:
    """`model` compiled in about four parts with as many bytes of parameters each."""
    return torch.compile(model, backend=partial(compile_in_parts, part_bytes=_part_bytes(model), backend=backend))


def _part_bytes(model: nn.Module) -> int:
    return max(_bytes_in(model) // _NUM_PARTS, 1)


def _bytes_in(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def compile_regions(model: nn.Module, **options: Any) -> None:
    """Has torch.compile make the repeated blocks of `model`, in place, with its own `options`; names of parameters stay.

    Raises:
        ConfigError: it has none.
    """
    regions = list(regions_of(model))
    if not regions:
        raise ConfigError(
            'compile="regions" needs a model with repeated blocks, in an nn.ModuleList or nn.Sequential, but this one has none; use compile=True'
        )
    for region in regions:
        region.compile(**options)


def regions_of(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost members of lists and sequences that have parts themselves."""
    for child in model.children():
        if isinstance(model, _CONTAINERS) and not isinstance(child, _CONTAINERS) and any(True for _ in child.children()):
            yield child
        else:
            yield from regions_of(child)
