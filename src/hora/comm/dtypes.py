"""The dtypes whose names may travel between ranks; one list, in one order, on all of them."""

import torch

_NAMES = (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 complex128 uint16 uint32 uint64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
"""dtype by name."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
