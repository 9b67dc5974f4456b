"""Trees of values and tensors as JSON and named tensors, and back: what is sent between ranks and written to checkpoints.

No pickle: nothing but values can come out of `decode`, whoever wrote what goes in. A JSON object with a key that begins with `$` stands for
what JSON cannot say: `{"$tuple": [...]}`, `{"$set": [...]}`, `{"$frozenset": [...]}`, `{"$dict": [[key, value], ...]}` (keys other than words,
and words that begin with `$`), `{"$float": "nan"}`, `{"$complex": [real, imaginary]}`, `{"$int": hexadecimal}`, `{"$bytes": base64}`,
`{"$tensor": name}`, `{"$array": [dtype, shape, name]}`, `{"$scalar": [dtype, base64]}`, `{"$dataclass": [class, fields]}`. What is large lies
among the tensors: `{"$long_bytes": name}`, `{"$long_str": name}`. Floats and integers of any size come back exactly.
"""

import base64
import binascii
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hora.comm import arrays, classes
from hora.errors import ConfigError

MAX_DEPTH = 100

_LONG_BYTES = 64 * 1024
"""From what size text and bytes are tensors: JSON would copy them several times."""

_LONG_INT_BITS = 4096
"""Python refuses to read and write very long integers in decimal."""

_KEYS = "None, bool, int, float, complex, str, bytes, a NumPy scalar, or a tuple or frozenset of these"

Tree = Any
"""None, bool, int, float, complex, str, bytes, Tensor, a NumPy array or scalar, or a list, tuple, dict, set, frozenset or dataclass of trees."""

Skeleton = Any
"""A tree as JSON, with names where its tensors were."""

_Path = tuple[str, ...]


def encode(tree: Tree, place: tuple[str, ...] = ()) -> tuple[Skeleton, dict[str, Tensor]]:
    """Takes `tree` apart into JSON and tensors, which are named after their place in the tree (`state.0.exp_avg`) and not copied.

    Subclasses of dict become dict, `torch.Size` becomes tuple, parameters become tensors. Of a dataclass its fields are kept, and nothing else.

    Args:
        tree: what to take apart.
        place: where it stands itself, if in something larger.

    Raises:
        ConfigError: something in the tree is of another type, or the tree is deeper than 100 levels; the message names the place.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(tree, place, tensors), tensors


def decode(skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> Tree:
    """Puts a tree together again.

    Raises:
        ConfigError: `skeleton` is not what `encode` makes, or names a tensor that is not in `tensors`, or a dataclass that is not loaded.
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
    except ConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ConfigError(f"an encoded value must be one that hora.comm.codec wrote, but {str(skeleton)[:80]} is not: {error}") from error


def _encode(tree: Tree, path: _Path, tensors: dict[str, Tensor]) -> Skeleton:
    if len(path) > MAX_DEPTH:
        raise ConfigError(
            f"a tree must be at most {MAX_DEPTH} levels deep, but at {'.'.join(path[:5])}... it is deeper (does it contain itself?)"
        )
    if type(tree) in _PLAIN:
        return _PLAIN[type(tree)](tree)
    encoder = _ENCODERS.get(type(tree)) or next((encoder for fits, encoder in _FAMILIES if fits(tree)), None)
    if encoder is None:
        raise ConfigError(_refusal(tree, path))
    return encoder(tree, path, tensors)


def _encode_int(tree: int) -> Skeleton:
    return tree if tree.bit_length() <= _LONG_INT_BITS else {"$int": hex(tree)}


def _encode_float(tree: float) -> Skeleton:
    return tree if math.isfinite(tree) else {"$float": repr(tree)}


def _encode_str(tree: str, path: _Path, tensors: dict[str, Tensor]) -> Skeleton:
    if len(tree) < _LONG_BYTES:
        return tree
    return {"$long_str": _add_tensor(arrays.bytes_as_tensor(tree.encode(errors="surrogatepass")), path, tensors)}


def _encode_bytes(tree: bytes, path: _Path, tensors: dict[str, Tensor]) -> Skeleton:
    if len(tree) < _LONG_BYTES:
        return {"$bytes": base64.b64encode(tree).decode()}
    return {"$long_bytes": _add_tensor(arrays.bytes_as_tensor(tree), path, tensors)}


def _encode_items(tree: Iterable[Tree], path: _Path, tensors: dict[str, Tensor]) -> list[Skeleton]:
    return [_encode(branch, (*path, str(index)), tensors) for index, branch in enumerate(tree)]


def _encode_set(tree: Iterable[Any], path: _Path, tensors: dict[str, Tensor]) -> list[Skeleton]:
    """The elements, in an order that does not depend on their hashes."""
    return sorted((_encode_key(element, f"the elements of {_place(path)}", path, tensors) for element in tree), key=json.dumps)


def _encode_dict(tree: Mapping[Any, Tree], path: _Path, tensors: dict[str, Tensor]) -> Skeleton:
    pairs = [
        [
            key if type(key) is str else _encode_key(key, f"the keys of {_place(path)}", path, tensors),
            _encode(branch, (*path, key if type(key) is str else _say(key)), tensors),
        ]
        for key, branch in tree.items()
    ]
    if all(type(key) is str and not key.startswith("$") for key in tree):
        return dict(pairs)
    return {"$dict": pairs}


def _encode_key(key: Any, what: str, path: _Path, tensors: dict[str, Tensor]) -> Skeleton:
    """A key of a dict or an element of a set: what can be hashed, and is the same after it was sent."""
    if type(key) in (tuple, frozenset):
        parts = [_encode_key(part, what, path, tensors) for part in key]
        return {"$tuple": parts} if type(key) is tuple else {"$frozenset": sorted(parts, key=json.dumps)}
    if key is None or type(key) in (bool, int, float, complex, str, bytes) or isinstance(key, np.generic):
        return _encode(key, path, tensors)
    raise ConfigError(f"{what} must be {_KEYS}, but {_say(key)} is {_kind(key)}")


def _encode_array(tree: np.ndarray[Any, Any], path: _Path, tensors: dict[str, Tensor]) -> Skeleton:
    _require_plain_dtype(tree, path)
    return {"$array": [tree.dtype.str, list(tree.shape), _add_tensor(arrays.array_as_bytes(tree), path, tensors)]}


def _encode_scalar(tree: np.generic, path: _Path, _: dict[str, Tensor]) -> Skeleton:
    _require_plain_dtype(tree, path)
    return {"$scalar": arrays.scalar_as_text(tree)}


def _require_plain_dtype(tree: np.ndarray[Any, Any] | np.generic, path: _Path) -> None:
    if not arrays.has_plain_dtype(tree):
        raise ConfigError(f"{_place(path)} must be a NumPy array of numbers, booleans, times or text, but its dtype is {tree.dtype}")


def _encode_dataclass(tree: Any, path: _Path, tensors: dict[str, Tensor]) -> Skeleton:
    try:
        name, fields = classes.name_of(tree), classes.fields_of(tree)
    except ConfigError as error:
        raise ConfigError(f"{_place(path)} is {_kind(tree)}, and {error}") from error
    return {"$dataclass": [name, {field: _encode(value, (*path, field), tensors) for field, value in fields.items()}]}


def _encode_tensor(tree: Tensor, path: _Path, tensors: dict[str, Tensor]) -> Skeleton:
    if tree.layout != torch.strided or tree.is_quantized or tree.is_meta or tree.is_nested:
        found = "a nested tensor" if tree.is_nested else f"{tree.layout} on {tree.device}"
        raise ConfigError(f"{_place(path)} must be a dense tensor with values, but is {found}; convert it first")
    return {"$tensor": _add_tensor(tree.detach(), path, tensors)}


def _refusal(tree: Any, path: _Path) -> str:
    advice = "; send its value or its name" if isinstance(tree, Enum) else ""
    return (
        f"{_place(path)} must be None, bool, int, float, complex, str, bytes, a tensor, a NumPy array or scalar, or a list, tuple, dict, set, "
        f"frozenset or dataclass of these, but is {_kind(tree)} instead{advice}"
    )


_Encoder = Callable[[Any, _Path, dict[str, Tensor]], Skeleton]

_PLAIN: Mapping[type, Callable[[Any], Skeleton]] = {
    type(None): lambda tree: tree,
    bool: lambda tree: tree,
    int: _encode_int,
    float: _encode_float,
    complex: lambda tree: {"$complex": [_encode_float(tree.real), _encode_float(tree.imag)]},
}
"""By exact type: a subclass, such as an enumeration of integers, would not come back as what it is."""

_ENCODERS: Mapping[type, _Encoder] = {
    str: _encode_str,
    bytes: _encode_bytes,
    list: _encode_items,
    tuple: lambda tree, path, tensors: {"$tuple": _encode_items(tree, path, tensors)},
    torch.Size: lambda tree, path, tensors: {"$tuple": _encode_items(tree, path, tensors)},
    dict: _encode_dict,
    set: lambda tree, path, tensors: {"$set": _encode_set(tree, path, tensors)},
    frozenset: lambda tree, path, tensors: {"$frozenset": _encode_set(tree, path, tensors)},
    np.ndarray: _encode_array,
}
"""By exact type too."""

_FAMILIES: tuple[tuple[Callable[[Any], bool], _Encoder], ...] = (
    (lambda tree: isinstance(tree, Tensor), _encode_tensor),
    (lambda tree: isinstance(tree, np.generic), _encode_scalar),
    (lambda tree: dataclasses.is_dataclass(tree) and not isinstance(tree, type | Enum), _encode_dataclass),
    (lambda tree: isinstance(tree, dict), _encode_dict),
)


def _add_tensor(tensor: Tensor, path: _Path, tensors: dict[str, Tensor]) -> str:
    name = plain = ".".join(path) or "tensor"
    count = 1
    while name in tensors:
        count += 1
        name = f"{plain}~{count}"
    tensors[name] = tensor
    return name


def _place(path: _Path) -> str:
    return ".".join(path) or "the value"


def _say(key: Any) -> str:
    try:
        return f"{key!r:.80}"
    except ValueError:  # a very long integer
        return "..."


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _decode_float(value: Any, _: Mapping[str, Tensor]) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise ValueError("nan, inf or -inf")
    return float(value)


def _decode_complex(value: Any, tensors: Mapping[str, Tensor]) -> complex:
    real, imaginary = (decode(part, tensors) for part in value)
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("two floats")
    return complex(real, imaginary)


def _decode_dict(value: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Tree]:
    pairs = [(decode(key, tensors), decode(branch, tensors)) for key, branch in value]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _decode_items(value: Any, tensors: Mapping[str, Tensor]) -> list[Tree]:
    if not isinstance(value, list):
        raise ValueError("a list")
    return [decode(branch, tensors) for branch in value]


def _decode_array(value: Any, tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    dtype, shape, name = value
    return arrays.array_from_bytes(dtype, shape, tensors[name])


def _decode_dataclass(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    name, fields = value
    return classes.rebuild(name, {field: decode(branch, tensors) for field, branch in fields.items()})


_DECODERS: Mapping[str, Callable[[Any, Mapping[str, Tensor]], Tree]] = {
    "$float": _decode_float,
    "$complex": _decode_complex,
    "$int": lambda value, _: int(value, 16),
    "$bytes": lambda value, _: base64.b64decode(value, validate=True),
    "$long_bytes": lambda value, tensors: arrays.as_array(tensors[value]).tobytes(),
    "$long_str": lambda value, tensors: str(arrays.as_array(tensors[value]).data, "utf-8", "surrogatepass"),
    "$tensor": lambda value, tensors: tensors[value],
    "$array": _decode_array,
    "$scalar": lambda value, _: arrays.scalar_from_text(*value),
    "$tuple": lambda value, tensors: tuple(_decode_items(value, tensors)),
    "$set": lambda value, tensors: set(_decode_items(value, tensors)),
    "$frozenset": lambda value, tensors: frozenset(_decode_items(value, tensors)),
    "$dict": _decode_dict,
    "$dataclass": _decode_dataclass,
}
