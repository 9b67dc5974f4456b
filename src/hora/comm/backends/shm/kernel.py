"""The engine in C: kernel.c, called through ctypes, which lets go of Python's lock meanwhile."""

import ctypes
import os
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from hora.comm.backends.shm.calls import explain
from hora.comm.backends.shm.engine import AT_ONCE_BYTES, DTYPES, CallWords, Engine, Op
from hora.comm.backends.shm.segment import CALL_WORDS, Segment

_SPIN_S = 50e-6
"""How long a rank looks without sleeping when each has a core of its own."""

_Words = ctypes.c_uint64 * CALL_WORDS


class _Group(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p), ("rank", ctypes.c_int32), ("size", ctypes.c_int32), ("fd", ctypes.c_int32), ("round", ctypes.c_uint32),
        ("culprit", ctypes.c_int32), ("closing", ctypes.c_int32), ("timeout_ns", ctypes.c_int64), ("spin_ns", ctypes.c_int64),
    )  # fmt: skip


class Kernel(Engine):
    """Carries out collectives with the library `kernel`."""

    def __init__(self, segment: Segment, kernel: ctypes.CDLL):
        self.segment = segment
        self._kernel = kernel
        for name in ("hora_write", "hora_read"):
            getattr(kernel, name).restype = ctypes.c_int64
        spin_s = _SPIN_S if segment.size <= len(os.sched_getaffinity(0)) else 0.0
        self._group = _Group(segment.address, segment.rank, segment.size, segment.fd, 0, -1, 0, 0, int(spin_s * 1e9))
        self._handle = ctypes.byref(self._group)
        self._all_reduce = kernel.hora_all_reduce
        self._all_reduce.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        ]  # fmt: skip
        self._pointers = ctypes.c_void_p * segment.size
        self._sizes = ctypes.c_int64 * segment.size

    @override
    def barrier(self, call: CallWords) -> None:
        self._check(self._kernel.hora_barrier(self._handle, _Words(*call)))

    @override
    def all_reduce(self, tensor: Tensor, op: Op, call: CallWords) -> None:
        dtype = DTYPES[tensor.dtype]
        failed = self._all_reduce(self._handle, tensor.data_ptr(), tensor.numel(), dtype, op, AT_ONCE_BYTES, _Words(*call))
        if failed:
            self._check(failed)

    @override
    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Op, call: CallWords) -> None:
        dtype, numel = DTYPES[output.dtype], ctypes.c_int64(output.numel())
        to = ctypes.c_void_p(output.data_ptr())
        self._check(self._kernel.hora_reduce_scatter(self._handle, to, self._addresses(parts), numel, dtype, int(op), _Words(*call)))

    @override
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, call: CallWords) -> None:
        mine, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes)
        self._check(self._kernel.hora_all_gather(self._handle, self._addresses(outputs), mine, size, _Words(*call)))

    @override
    def broadcast(self, tensor: Tensor, root: int, call: CallWords) -> None:
        address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes)
        self._check(self._kernel.hora_broadcast(self._handle, address, size, root, _Words(*call)))

    @override
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: CallWords) -> None:
        expected, sizes = (self._sizes(*(part.nbytes for part in parts)) for parts in (outputs, inputs))
        to, what = self._addresses(outputs), self._addresses(inputs)
        self._check(self._kernel.hora_all_to_all(self._handle, to, expected, what, sizes, _Words(*call)))

    @override
    def write(self, dst: int, data: Tensor) -> int:
        return int(self._kernel.hora_write(self._handle, dst, ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(data.nbytes)))

    @override
    def read(self, src: int, data: Tensor) -> int:
        return int(self._kernel.hora_read(self._handle, src, ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(data.nbytes)))

    @override
    def set_timeout(self, timeout_s: float) -> None:
        self._group.timeout_ns = int(timeout_s * 1e9)

    @override
    def close(self) -> None:
        self._group.closing = 1
        self.segment.leave(lambda: self._kernel.hora_wake(self._handle))

    def _addresses(self, tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        return self._pointers(*(tensor.data_ptr() for tensor in tensors))

    def _check(self, failed: int) -> None:
        if failed:
            raise explain(failed, self._group.culprit, self.segment, self._group.round, self._group.timeout_ns / 1e9)
