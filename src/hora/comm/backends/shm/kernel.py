"""The engine in C: kernel.c, called through ctypes, which lets go of Python's lock meanwhile."""

import ctypes
import os
from collections.abc import Callable, Sequence
from enum import IntEnum

from torch import Tensor
from typing_extensions import override

from hora import env
from hora.comm.backends.shm.calls import NOT_YET, TIMED_OUT, explain
from hora.comm.backends.shm.engine import AT_ONCE_BYTES, DTYPES, CallWords, Engine, Op
from hora.comm.backends.shm.segment import CALL_WORDS, MAX_LANES, Segment
from hora.comm.deadline import Deadline

WIDE_BYTES = 2**20
"""From this size on a call goes through all lanes."""

_SPIN_S = 50e-6
"""How long a rank looks without sleeping when each has a core of its own."""

_LOOK_S = 0.1
"""How long a rank waits for others to come to a call without a look at signals: while one of them loads its data, that may be long."""

_Words = ctypes.c_uint64 * CALL_WORDS


def lanes_for(size: int) -> int:
    """Threads that each of `size` ranks can have for a call, so that all have a core."""
    return max(1, min(MAX_LANES, len(os.sched_getaffinity(0)) // size))


class _Lane(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p), ("rank", ctypes.c_int32), ("size", ctypes.c_int32), ("fd", ctypes.c_int32), ("round", ctypes.c_uint32),
        ("culprit", ctypes.c_int32), ("closing", ctypes.c_int32), ("timeout_ns", ctypes.c_int64), ("spin_ns", ctypes.c_int64),
        ("look_ns", ctypes.c_int64), ("early", ctypes.c_int32),
    )  # fmt: skip


class _Job(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int), ("dtype", ctypes.c_int32), ("op", ctypes.c_int32), ("root", ctypes.c_int32), ("to", ctypes.c_void_p),
        ("from_", ctypes.c_void_p), ("outputs", ctypes.c_void_p), ("parts", ctypes.c_void_p), ("count", ctypes.c_int64),
        ("at_once", ctypes.c_int64), ("call", ctypes.c_void_p),
    )  # fmt: skip


class _Kind(IntEnum):
    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    BROADCAST = 3


class Kernel(Engine):
    """Carries out collectives with the library `kernel`; large ones in as many threads as the segment has lanes."""

    def __init__(self, segment: Segment, kernel: ctypes.CDLL):
        self.segment = segment
        self._kernel = kernel
        self._declare()
        self._team = ctypes.c_void_p(kernel.hora_new_team())  # never freed: a thread that is late may still look at it
        assert self._team.value is not None
        self._lanes = (_Lane * MAX_LANES).from_address(self._team.value)
        kernel.hora_set_lanes(self._team, segment.num_lanes)
        spin_s = _SPIN_S if segment.size <= len(os.sched_getaffinity(0)) else 0.0
        for number in range(segment.num_lanes):
            base = segment.address + segment.lane(number)
            look_s = env.LONGEST_S if number else _LOOK_S  # a thread of a wide call has no signals to hear
            self._lanes[number] = _Lane(base, segment.rank, segment.size, segment.fd, 0, -1, 0, 0, int(spin_s * 1e9), int(look_s * 1e9))
        self._first = ctypes.c_void_p(self._team.value)  # the first lane stands where the team begins
        self._timeout_s = 0.0
        self._posted = Deadline(0.0)
        self._pointers = ctypes.c_void_p * segment.size
        self._sizes = ctypes.c_int64 * segment.size

    def _declare(self) -> None:
        """Says what the functions take whose arguments are not all pointers and structures."""
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._kernel.hora_new_team.restype = pointer
        for name in ("hora_write", "hora_read"):
            getattr(self._kernel, name).restype = size
            getattr(self._kernel, name).argtypes = [pointer, number, pointer, size]
        self._all_reduce = self._kernel.hora_all_reduce
        self._all_reduce.argtypes = [pointer, pointer, size, number, number, size, pointer]
        self._kernel.hora_reduce_scatter.argtypes = [pointer, pointer, pointer, size, number, number, pointer]
        self._kernel.hora_all_gather.argtypes = [pointer, pointer, pointer, size, pointer]
        self._kernel.hora_post.argtypes = [pointer, pointer, size, pointer]
        self._kernel.hora_collect.argtypes = [pointer, pointer, size]
        self._kernel.hora_broadcast.argtypes = [pointer, pointer, size, number, pointer]

    def _is_wide(self, size_bytes: int) -> bool:
        return size_bytes >= WIDE_BYTES and self.segment.num_lanes > 1

    def _run_wide(self, kind: _Kind, call: CallWords, **fields: object) -> None:
        job = _Job(kind=kind, call=ctypes.cast(_Words(*call), ctypes.c_void_p), at_once=AT_ONCE_BYTES, **fields)
        self._call(self._kernel.hora_run_wide, self._team, ctypes.byref(job))

    @override
    def barrier(self, call: CallWords) -> None:
        self._call(self._kernel.hora_barrier, self._first, _Words(*call))

    @override
    def all_reduce(self, tensor: Tensor, op: Op, call: CallWords) -> None:
        dtype, numel, address = DTYPES[tensor.dtype], tensor.numel(), tensor.data_ptr()
        if self._is_wide(tensor.nbytes):
            self._run_wide(_Kind.ALL_REDUCE, call, to=address, count=numel, dtype=dtype, op=op)
        else:
            self._call(self._all_reduce, self._first, address, numel, dtype, op, AT_ONCE_BYTES, _Words(*call))

    @override
    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Op, call: CallWords) -> None:
        dtype, numel, to, given = DTYPES[output.dtype], output.numel(), output.data_ptr(), self._addresses(parts)
        if self._is_wide(output.nbytes * self.segment.size):
            self._run_wide(_Kind.REDUCE_SCATTER, call, to=to, parts=ctypes.addressof(given), count=numel, dtype=dtype, op=op)
        else:
            self._call(self._kernel.hora_reduce_scatter, self._first, to, given, numel, dtype, op, _Words(*call))

    @override
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, call: CallWords) -> None:
        to, address, size = self._addresses(outputs), tensor.data_ptr(), tensor.nbytes
        if self._is_wide(size):
            self._run_wide(_Kind.ALL_GATHER, call, outputs=ctypes.addressof(to), from_=address, count=size)
        else:
            self._call(self._kernel.hora_all_gather, self._first, to, address, size, _Words(*call))

    @override
    def post(self, tensor: Tensor, call: CallWords) -> None:
        self._posted = Deadline(self._timeout_s)
        self._check(self._kernel.hora_post(self._first, tensor.data_ptr(), tensor.nbytes, _Words(*call)))

    @override
    def collect(self, outputs: Sequence[Tensor]) -> None:
        self._call(self._kernel.hora_collect, self._first, self._addresses(outputs), outputs[0].nbytes, deadline=self._posted)

    @override
    def broadcast(self, tensor: Tensor, root: int, call: CallWords) -> None:
        address, size = tensor.data_ptr(), tensor.nbytes
        if self._is_wide(size):
            self._run_wide(_Kind.BROADCAST, call, to=address, count=size, root=root)
        else:
            self._call(self._kernel.hora_broadcast, self._first, address, size, root, _Words(*call))

    @override
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: CallWords) -> None:
        expected, sizes = (self._sizes(*(part.nbytes for part in parts)) for parts in (outputs, inputs))
        to, what = self._addresses(outputs), self._addresses(inputs)
        self._call(self._kernel.hora_all_to_all, self._first, to, expected, what, sizes, _Words(*call))

    @override
    def write(self, dst: int, data: Tensor) -> int:
        return int(self._kernel.hora_write(self._first, dst, data.data_ptr(), data.nbytes))

    @override
    def read(self, src: int, data: Tensor) -> int:
        return int(self._kernel.hora_read(self._first, src, data.data_ptr(), data.nbytes))

    @override
    def set_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            for number in range(self.segment.num_lanes):
                self._lanes[number].timeout_ns = int(timeout_s * 1e9)

    @override
    def close(self) -> None:
        self.segment.leave()
        self._kernel.hora_end_team(self._team)

    def _addresses(self, tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        return self._pointers(*(tensor.data_ptr() for tensor in tensors))

    @property
    @override
    def is_half_way(self) -> bool:
        return bool(self._lanes[0].early)

    def _call(self, function: Callable[..., int], *arguments: object, deadline: Deadline | None = None) -> None:
        """Makes a call again and again until all have come: in between Python has handlers of signals run."""
        deadline = deadline or Deadline(self._timeout_s)
        while (failed := function(*arguments)) == NOT_YET:
            if deadline.passed:
                failed = TIMED_OUT
                break
        self._check(failed)

    def _check(self, failed: int) -> None:
        if failed:
            first = self._lanes[0]
            raise explain(failed, first.culprit, self.segment, first.round, self._timeout_s)
