"""Batches and states as users nest them: tuples, named tuples, lists, dicts and dataclasses of tensors and plain values."""

import copy
import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same nesting with `function` of each tensor in its place."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        parts = [map_tensors(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [map_tensors(function, part) for part in tree]
    if type(tree) is dict:
        return {key: map_tensors(function, part) for key, part in tree.items()}
    if isinstance(tree, dict):
        changed = copy.copy(tree)
        changed.update({key: map_tensors(function, part) for key, part in tree.items()})
        return changed
    if _is_dataclass(tree):
        changed = copy.copy(tree)
        for name, part in _fields(tree):
            object.__setattr__(changed, name, map_tensors(function, part))
        return changed
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


class UnknownContent(Exception):
    """A batch or state holds an object in which there may be tensors that nobody sees."""


_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


def signature(tree: Any) -> Any:
    """What must be the same for two of them to go through one graph: nesting, shapes and types of tensors, and all that is no tensor.

    Raises:
        UnknownContent: they hold something else than tensors and plain values.
    """
    if isinstance(tree, Tensor):
        return "tensor", tuple(tree.shape), tree.dtype, tree.requires_grad
    if isinstance(tree, (tuple, list)):
        return type(tree), *map(signature, tree)
    if isinstance(tree, dict):
        return type(tree), *((signature(key), signature(part)) for key, part in tree.items())
    if _is_dataclass(tree):
        return type(tree), *(signature(part) for _, part in _fields(tree))
    if not isinstance(tree, _PLAIN):
        raise UnknownContent(f"a batch or state holds a {type(tree).__name__}, in which there may be tensors")
    return type(tree), tree  # for True is 1


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _fields(tree: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]


def to_device(tree: Any, device: torch.device) -> Any:
    """Tensors on `device`; those that are there already as they are."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)
