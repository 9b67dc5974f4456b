"""NumPy arrays and bytes as tensors of bytes, and back. Nothing is copied on the way there."""

import base64
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KINDS = "biufcmMSU"
_DTYPE = re.compile(rf"[<>|=]?[{_KINDS}]\d*(\[\d*[A-Za-z]+\])?")


def has_plain_dtype(value: np.ndarray[Any, Any] | np.generic) -> bool:
    """Whether its elements are numbers, times or text: all there is to them is their bytes."""
    return value.dtype.kind in _KINDS and value.dtype.names is None


def array_as_bytes(array: np.ndarray[Any, Any]) -> Tensor:
    """The elements in C order as `uint8` [size in bytes], which shares the memory of a contiguous `array` and is not to be written."""
    if array.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return _tensor(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def array_from_bytes(dtype: str, shape: Sequence[int], content: Tensor) -> np.ndarray[Any, Any]:
    """An array on the memory of `content`.

    Raises:
        TypeError, ValueError: the three do not fit together.
    """
    kind = _dtype(dtype)
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * kind.itemsize != content.numel():
        raise ValueError(f"an array of {dtype} {shape} cannot have {content.numel()} bytes")
    if content.numel() == 0:
        return np.empty(tuple(shape), kind)
    return np.ndarray(tuple(shape), kind, as_array(content).data)


def scalar_as_text(value: np.generic) -> list[str]:
    """The dtype and the bytes of a scalar."""
    return [value.dtype.str, base64.b64encode(value.tobytes()).decode()]


def scalar_from_text(dtype: str, text: str) -> Any:
    """What `scalar_as_text` described.

    Raises:
        TypeError, ValueError: the two do not fit together.
    """
    kind, content = _dtype(dtype), base64.b64decode(text, validate=True)
    if len(content) < max(1, kind.itemsize) or (kind.itemsize and len(content) != kind.itemsize):
        raise ValueError(f"a scalar of {dtype} cannot have {len(content)} bytes")
    return np.ndarray((), kind, content)[()]


def bytes_as_tensor(content: bytes) -> Tensor:
    """The memory of `content` as `uint8` [size], not to be written."""
    return _tensor(np.frombuffer(content, np.uint8)) if content else torch.empty(0, dtype=torch.uint8, device="cpu")


def as_array(content: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a flat `uint8` tensor on the CPU.

    Raises:
        ValueError: it is another kind of tensor.
    """
    if content.dtype != torch.uint8 or content.dim() != 1 or content.device.type != "cpu" or not content.is_contiguous():
        raise ValueError(f"bytes must lie in a flat tensor of uint8 on the CPU, not in {content.dtype} {list(content.shape)}")
    array: np.ndarray[Any, Any] = content.numpy()
    return array


def _tensor(flat: np.ndarray[Any, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that must not be written; nobody does
        return torch.from_numpy(flat)


def _dtype(name: str) -> np.dtype[Any]:
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ValueError(f"no plain dtype is called {name!r}")
    return np.dtype(name)
