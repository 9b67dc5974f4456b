"""Tensors as the bytes of a safetensors file, made one tensor at a time so that a digest is taken while they are written.

Reading is left to the safetensors library. https://huggingface.co/docs/safetensors says what the format is: the length of a JSON header
(8 bytes, little-endian), the header, then the data of all tensors without gaps.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from hora.errors import ConfigError

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_METADATA: Final = "__metadata__"


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as `uint8` [size in bytes]; a change of one changes the other."""
    return tensor.reshape(-1).view(torch.uint8)


class TensorFile:
    """A safetensors file to be written: its size is known at once, its bytes are made when asked for.

    Args:
        name: of the file.
        tensors: of any device and layout in memory; they are copied to the CPU one by one, and written aligned to their item size.
        metadata: words for other programs.

    Raises:
        ConfigError: a type or a name has no place in the format; all are named.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        self.name = name
        wrong = {key: str(tensor.dtype) for key, tensor in tensors.items() if tensor.dtype not in _DTYPES or key == _METADATA}
        if wrong:
            raise ConfigError(f"{name} cannot hold tensors of these names and types: {wrong}")
        self._tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
        self._header = _header(self._tensors, metadata)
        self.size_bytes = len(self._header) + sum(tensor.nbytes for tensor in self._tensors.values())

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of the file in order."""
        yield memoryview(self._header)
        for tensor in self._tensors.values():
            if tensor.numel():
                yield as_bytes(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()).numpy().data


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file into memory on the CPU.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is no such file.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        # The library's tensors lie on the mapped file, which may be removed or shortened later; a clone does not.
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping
