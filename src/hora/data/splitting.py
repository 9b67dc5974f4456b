"""Global batches that somebody else has put together, cut along their first dimension.

A batch is a tree of tensors, arrays and lists of one item for each sample, in dicts, lists, tuples and named tuples. Whatever has no first
dimension (a number, a text) goes to every part.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from hora.errors import ConfigError


def batch_size(batch: Any) -> int:
    """Number of samples in `batch`: the length of the first dimension of its tensors and arrays, or of its lists if it has none.

    Raises:
        ConfigError: the tensors differ in it, or nothing in the batch has one.
    """
    sizes: dict[str, int] = {}
    _walk(batch, "batch", lambda leaf, path: sizes.setdefault(path, len(leaf)) if _has_samples(leaf) else None)
    if not sizes:
        if isinstance(batch, list | tuple):
            return len(batch)
        raise ConfigError(
            f"a global batch must hold tensors, arrays or lists, but is of type {type(batch).__name__}; use a data set with an index"
        )
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            "all tensors of a global batch must have one entry for each sample, but their lengths differ: "
            + ", ".join(f"{path} has {size}" for path, size in sizes.items())
        )
    return next(iter(sizes.values()))


def part_of(batch: Any, part: range, size: int) -> Any:
    """The samples `part` of a batch of `size`."""

    def cut(leaf: Any, _path: str) -> Any:
        return leaf[part.start : part.stop] if _has_samples(leaf) or (isinstance(leaf, list | tuple) and len(leaf) == size) else leaf

    return _walk(batch, "batch", cut)


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0


def _walk(tree: Any, path: str, visit: Callable[[Any, str], Any]) -> Any:
    """Applies `visit` to the leaves; a list or tuple without tensors or containers in it is a leaf."""
    if isinstance(tree, Mapping):
        cut = {key: _walk(value, f"{path}.{key}", visit) for key, value in tree.items()}
        if isinstance(tree, dict):  # which may be made otherwise than of a dict, as defaultdict is
            copied = copy.copy(tree)
            copied.update(cut)
            return copied
        return type(tree)(cut)  # type: ignore[call-arg]
    if isinstance(tree, list | tuple) and any(isinstance(item, Tensor | np.ndarray | Mapping | list | tuple) for item in tree):
        items = [_walk(item, f"{path}.{index}", visit) for index, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return visit(tree, path)
