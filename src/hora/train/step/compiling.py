"""What `compile` gives to torch.compile: the whole model, or its repeated blocks.

The whole computes fastest, takes longest to compile, and hands over all gradients at once when backward ends. Blocks (layers of a ModuleList or
Sequential) are compiled once for all that are alike, which PyTorch calls regional compilation, and hand over their gradients one after the other, so
that these travel during backward.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from hora.errors import ConfigError

Compile = bool | Literal["regions"]

_CONTAINERS = nn.ModuleList, nn.Sequential


def compiled(model: nn.Module, how: Compile) -> Any:
    """`model` as it is to be called.

    Raises:
        ConfigError: it has no blocks.
    """
    if how == "regions":
        compile_regions(model)
        return model
    return torch.compile(model) if how else model


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
