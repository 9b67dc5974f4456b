"""Divides a gradient on a CPU and finds its largest magnitude in one pass over memory, where there is the C kernel (`comm.backends.shm`)."""

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from hora.comm.backends.shm.build import load_kernel


def divide_and_look(values: Tensor, divisor: float, out: Tensor) -> float | None:
    """Writes `values / divisor` into `out`, with the bits of `torch.div`.

    Args:
        values: of any shape, on a CPU.
        divisor: is rounded to their type.
        out: of the same shape, without gaps in memory; shares none with `values`, or is `values` itself, which is left to torch.

    Returns:
        The largest magnitude among `values`: infinity or NaN if one is not finite. None, with nothing written, where torch must do it: without the
        kernel, for other types than float32, in place, and where the two do not lie alike in memory.
    """
    known = (
        values.dtype is torch.float32
        and values.is_cpu
        and out.dtype is torch.float32
        and values.stride() == out.stride()
        and not values.is_neg()
    )
    source, target = values.data_ptr(), out.data_ptr()
    if not known or (source == target and values.numel() > 0) or (divide := _divide()) is None:
        return None
    (largest,) = struct.unpack("f", struct.pack("I", divide(source, target, values.numel(), divisor)))
    return float(largest)


@lru_cache(1)
def _divide() -> Callable[[int, int, int, float], int] | None:
    kernel = load_kernel()
    if kernel is None:
        return None
    divide = kernel.hora_divide
    divide.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float]
    divide.restype = ctypes.c_uint32
    return divide
