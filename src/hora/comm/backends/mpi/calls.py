"""What ranks say about a call before they make it, so that ranks that are about to make different ones are told so, and not mixed up."""

import hashlib
from dataclasses import dataclass

import torch

from hora.comm.backends.queued import Mismatched
from hora.comm.diagnosis import say_bytes
from hora.comm.dtypes import dtype_name

TEXT_BYTES = 128
"""How much of a call is told when calls differ."""

_MPI_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
_MPI_OPS_OF_BOOLS = _MPI_OPS | {"SUM": "MAX", "PRODUCT": "MIN"}
_BITWISE = ("BAND", "BOR", "BXOR")

_DATATYPES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.uint8: "UINT8_T", torch.int8: "INT8_T", torch.int16: "INT16_T",
    torch.int32: "INT32_T", torch.int64: "INT64_T", torch.bool: "UINT8_T",
}  # fmt: skip
HALVES = (torch.float16, torch.bfloat16)
"""What MPI cannot add up; it travels as float32."""


@dataclass(frozen=True)
class Call:
    """A collective, as all its ranks must make it. `size_bytes` is what a rank gives or gets, -1 where that may differ."""

    kind: str
    size_bytes: int = 0
    dtype: torch.dtype | None = None
    op: str | None = None
    root: int | None = None

    def __str__(self) -> str:
        size = "" if self.size_bytes < 0 else f" of {say_bytes(self.size_bytes)}"
        dtype = "" if self.dtype is None else f" {dtype_name(self.dtype)}"
        op = "" if self.op is None else f" {self.op}"
        return f"{self.kind}{size}{dtype}{op}" + ("" if self.root is None else f" with root {self.root}")

    @property
    def digest(self) -> int:
        """A number that tells it from other calls."""
        exact = (self.kind, self.size_bytes, str(self.dtype), self.op, self.root)
        return int.from_bytes(hashlib.blake2b(repr(exact).encode(), digest_size=8).digest()) >> 2

    @property
    def told(self) -> bytes:
        """Its text in a fixed number of bytes."""
        size = "" if self.size_bytes < 0 else f" ({self.size_bytes})"
        return f"{self}{size}".encode()[:TEXT_BYTES].ljust(TEXT_BYTES)


def explain(told: bytes, size: int) -> Mismatched:
    """The error for calls that differ, from what each of `size` ranks told."""
    callers: dict[str, list[str]] = {}
    for rank in range(size):
        text = told[rank * TEXT_BYTES : (rank + 1) * TEXT_BYTES].decode(errors="replace").strip()
        callers.setdefault(text, []).append(f"rank {rank}")
    clauses = "; ".join(f"{', '.join(ranks)}: {text}" for text, ranks in callers.items())
    return Mismatched(f"all ranks of a group must make the same call, but they are about to make others. {clauses}")


def mpi_names(dtype: torch.dtype, op: str) -> tuple[str, str]:
    """MPI's names for a type and an operation on it. Of booleans, which are bytes, any and all are the largest and the smallest.

    Raises:
        RuntimeError: the backend cannot combine such values like that.
    """
    if dtype not in _DATATYPES and dtype not in HALVES:
        known = ", ".join(dtype_name(each) for each in (*_DATATYPES, *HALVES))
        raise RuntimeError(f"backend mpi can reduce {known}, but not {dtype_name(dtype)}")
    if (dtype.is_floating_point and op in _BITWISE) or (not dtype.is_floating_point and op == "AVG"):
        raise RuntimeError(f"backend mpi cannot reduce {dtype_name(dtype)} by {op}")
    return _DATATYPES.get(dtype, "FLOAT"), (_MPI_OPS_OF_BOOLS if dtype is torch.bool else _MPI_OPS)[op]
