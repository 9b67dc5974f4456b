"""Trees of plain values and tensors as JSON and named tensors, and back: what is sent between ranks and written to checkpoints.

No pickle: nothing but values can come out of `decode`, whoever wrote what goes in. A JSON object with a key that begins with `$` stands for
what JSON cannot say: `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}` (keys that are integers, or begin with `$`), `{"$float": "nan"}`,
`{"$bytes": base64}`, `{"$tensor": name}`. Floats and integers of any size come back exactly.
"""

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hora.errors import ConfigError

MAX_DEPTH = 100

Tree = Any
"""None, bool, int, float, str, bytes, Tensor, or a list, tuple or dict (keys: str or int) of trees."""

Skeleton = Any
"""A tree as JSON, with names where its tensors were."""


def encode(tree: Tree) -> tuple[Skeleton, dict[str, Tensor]]:
    """Takes `tree` apart into JSON and tensors, which are named after their place in the tree (`state.0.exp_avg`) and not copied.

    Subclasses of dict become dict, `torch.Size` becomes tuple, parameters become tensors.

    Raises:
        ConfigError: something in the tree is of another type, or the tree is deeper than 100 levels; the message names the place.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(tree, (), tensors), tensors


def decode(skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> Tree:
    """Puts a tree together again.

    Raises:
        ConfigError: `skeleton` is not what `encode` makes, or names a tensor that is not in `tensors`.
    """
    if isinstance(skeleton, list):
        return [decode(branch, tensors) for branch in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tags = [key for key in skeleton if key.startswith("$")]
    if not tags:
        return {key: decode(branch, tensors) for key, branch in skeleton.items()}
    try:
        (tag,) = skeleton
        return _DECODERS[tag](skeleton[tag], tensors)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ConfigError(f"an encoded value must be one that hora.comm.codec wrote, but {str(skeleton)[:80]} is not: {error}") from error


def _encode(tree: Tree, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Skeleton:
    if len(path) > MAX_DEPTH:
        raise ConfigError(
            f"a tree must be at most {MAX_DEPTH} levels deep, but at {'.'.join(path[:5])}... it is deeper (does it contain itself?)"
        )
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else {"$float": repr(tree)}
    if isinstance(tree, Tensor):
        return {"$tensor": _add_tensor(tree.detach(), path, tensors)}
    if type(tree) is bytes:
        return {"$bytes": base64.b64encode(tree).decode()}
    if isinstance(tree, dict):
        return _encode_dict(tree, path, tensors)
    if type(tree) in (list, tuple, torch.Size):
        branches = [_encode(branch, (*path, str(index)), tensors) for index, branch in enumerate(tree)]
        return branches if type(tree) is list else {"$tuple": branches}
    raise ConfigError(
        f"{_place(path)} must be None, bool, int, float, str, bytes, a tensor, or a list, tuple or dict of these, but is {_kind(tree)} instead"
    )


def _encode_dict(tree: Mapping[Any, Tree], path: tuple[str, ...], tensors: dict[str, Tensor]) -> Skeleton:
    for key in tree:
        if type(key) not in (str, int):
            raise ConfigError(f"the keys of {_place(path)} must be str or int, but {key!r} is {_kind(key)}")
    branches = {key: _encode(branch, (*path, str(key)), tensors) for key, branch in tree.items()}
    if all(type(key) is str and not key.startswith("$") for key in branches):
        return branches
    return {"$dict": [[key, branch] for key, branch in branches.items()]}


def _add_tensor(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ConfigError(f"{_place(path)} must be a dense tensor with values, but is {tensor.layout} on {tensor.device}; convert it first")
    name = plain = ".".join(path) or "tensor"
    count = 1
    while name in tensors:
        count += 1
        name = f"{plain}~{count}"
    tensors[name] = tensor
    return name


def _place(path: tuple[str, ...]) -> str:
    return ".".join(path) or "the value"


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _decode_float(value: Any, _: Mapping[str, Tensor]) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise ValueError("nan, inf or -inf")
    return float(value)


def _decode_dict(value: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Tree]:
    if any(type(key) not in (str, int) for key, _ in value):
        raise ValueError("keys are str or int")
    return {key: decode(branch, tensors) for key, branch in value}


_DECODERS: Mapping[str, Callable[[Any, Mapping[str, Tensor]], Tree]] = {
    "$float": _decode_float,
    "$bytes": lambda value, _: base64.b64decode(value, validate=True),
    "$tensor": lambda value, tensors: tensors[value],
    "$tuple": lambda value, tensors: tuple(decode(branch, tensors) for branch in value),
    "$dict": _decode_dict,
}
