"""The process group of backend shm: what torch.distributed calls, as collectives of an engine on the segment."""

import platform
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora.comm.backends.python_group import flatten, op_name, overlap, put_back, require_sizes
from hora.comm.backends.queued import PostedCall, QueuedGroup
from hora.comm.backends.shm.build import load_kernel
from hora.comm.backends.shm.calls import Kind, say
from hora.comm.backends.shm.engine import DTYPES, Engine, Op
from hora.comm.backends.shm.kernel import Kernel, lanes_for
from hora.comm.backends.shm.mailroom import Mailroom
from hora.comm.backends.shm.pure import Pure
from hora.comm.backends.shm.segment import Segment
from hora.comm.torch_private import Store

_BYTES_OF_BOOLS = {Op.SUM: Op.MAX, Op.PRODUCT: Op.MIN}


class ShmGroup(QueuedGroup):
    """Ranks of one host, with tensors on the CPU."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size, timeout)
        kernel = load_kernel()
        segment = Segment(store, rank, size, max_lanes=1 if kernel is None else lanes_for(size), unable=_unable(kernel is not None))
        self._engine: Engine = Kernel(segment, kernel) if kernel is not None else Pure(segment)
        self._mailroom = Mailroom(self._engine, self._timeout_s)

    @override
    def getBackendName(self) -> str:
        return "shm"

    # Sums -------------------------------------------------------------------------------------------------------------------------------

    @override
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        op = Op[op_name(opts.reduceOp, "shm")] if opts is not None else Op.SUM

        def act() -> None:
            for tensor in tensors:
                self._all_reduce(tensor, op, Kind.ALL_REDUCE)

        return self.run(act, tensors, opts)

    allreduce_coalesced = allreduce

    @override
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        op, root = Op[op_name(opts.reduceOp, "shm")], opts.rootRank

        def act() -> None:
            for tensor in tensors:
                self._all_reduce(tensor if self._rank == root else tensor.detach().clone(), op, Kind.REDUCE, root)

        return self.run(act, tensors, opts)

    def _all_reduce(self, tensor: Tensor, op: Op, kind: Kind, root: int | None = None) -> None:
        flat = _flat(tensor)
        numbers, op = _numbers(flat, op)
        self._engine.all_reduce(numbers, op, say(kind, size=numbers.numel(), dtype=numbers.dtype, op=op, root=root))
        put_back(tensor, flat)

    @override
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        op = Op[op_name(opts.reduceOp, "shm")]

        def act() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, [_flat(part) for part in parts], op)

        return self.run(act, outputs, opts)

    @override
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        op = Op[op_name(opts.reduceOp, "shm")] if opts is not None else Op.SUM
        return self.run(lambda: self._reduce_scatter(output, _flat(tensor).chunk(self._size), op), [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    @override
    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        op = Op[op_name(opts.reduceOp, "shm")] if opts is not None else Op.SUM

        def act() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, _flat(tensor).chunk(self._size), op)

        return self.run(act, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Op) -> None:
        flat = _flat(output)
        # The output may be one of the parts, which others are still to be sent.
        result = torch.empty_like(flat) if any(overlap(flat, part) for part in parts) else flat
        require_sizes("reduce_scatter", [part.numel() for part in parts] or [0] * self._size, [flat.numel()] * self._size)
        numbers, ours = _numbers(result, op)
        given = [_numbers(part, op)[0] for part in parts] if flat.numel() else [numbers] * self._size
        self._engine.reduce_scatter(numbers, given, ours, say(Kind.REDUCE_SCATTER, size=numbers.numel(), dtype=numbers.dtype, op=ours))
        put_back(output, result)

    # Copies -----------------------------------------------------------------------------------------------------------------------------

    @override
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        root = opts.rootRank

        def act() -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                self._engine.broadcast(flat, root, say(Kind.BROADCAST, size=flat.nbytes, root=root))
                if self._rank != root:
                    put_back(tensor, flat)

        return self.run(act, tensors, opts)

    @override
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def act() -> None:
            for received, sent in zip(outputs, inputs, strict=True):
                self._all_gather(received, sent)

        return self.run(act, outputs, opts)

    def post_all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> PostedCall | None:
        """`allgather` of a contiguous tensor into others like it, in two halves; None where other calls are under way, or for more than fits in."""
        if tensor.nbytes > self._engine.segment.slot_bytes:
            return None
        call = say(Kind.ALL_GATHER, size=tensor.nbytes)
        return self.post(lambda: self._engine.post(tensor, call), lambda: self._engine.collect(outputs))

    @override
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.run(lambda: self._all_gather_into(output, tensor), [output], opts)

    _allgather_base = all_gather_single

    @override
    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def act() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._all_gather_into(output, tensor)

        return self.run(act, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        flat = _flat(output)
        self._all_gather(flat.chunk(self._size) if flat.numel() else [flat] * self._size, tensor)
        put_back(output, flat)

    def _all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        flats, sent = [_flat(output) for output in outputs], _flat(tensor)
        require_sizes("all_gather", [flat.nbytes for flat in flats], [sent.nbytes] * self._size)
        self._engine.all_gather(flats, sent, say(Kind.ALL_GATHER, size=sent.nbytes))
        for output, flat in zip(outputs, flats, strict=True):
            put_back(output, flat)

    @override
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self.run(lambda: self._exchange(outputs, inputs, say(Kind.ALL_TO_ALL)), outputs, opts)

    @override
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        def act() -> None:
            to = _flat(output)
            self._exchange(self._cut(to, output, output_sizes), self._cut(_flat(tensor), tensor, sizes), say(Kind.ALL_TO_ALL))
            put_back(output, to)

        return self.run(act, [output], opts)

    alltoall_base = all_to_all_single

    def _cut(self, flat: Tensor, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """One part a rank: `sizes` rows each, or as many for each."""
        if not sizes:
            return flat.chunk(self._size) if flat.numel() else [flat] * self._size
        row = flat.numel() // max(1, tensor.size(0))
        parts: Sequence[Tensor] = flat.split([size * row for size in sizes])
        return parts

    @override
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        root = opts.rootRank

        def act() -> None:
            sent, nothing = _flat(inputs[0]), inputs[0].new_empty(0)
            received = outputs[0] if self._rank == root else [nothing] * self._size
            given = [sent if rank == root else nothing for rank in range(self._size)]
            self._exchange(received, given, say(Kind.GATHER, root=root))

        return self.run(act, outputs, opts)

    @override
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        root = opts.rootRank

        def act() -> None:
            nothing = outputs[0].new_empty(0)
            received = [outputs[0] if rank == root else nothing for rank in range(self._size)]
            self._exchange(received, inputs[0] if self._rank == root else [nothing] * self._size, say(Kind.SCATTER, root=root))

        return self.run(act, outputs, opts)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: Sequence[int]) -> None:
        flats = [_flat(output) for output in outputs]
        self._engine.all_to_all(flats, [_flat(tensor) for tensor in inputs], call)
        for output, flat in zip(outputs, flats, strict=True):
            put_back(output, flat)

    @override
    def barrier(self, opts: Any = None) -> dist.Work:
        return self.run(lambda: self._engine.barrier(say(Kind.BARRIER)), [], opts)

    # Messages ---------------------------------------------------------------------------------------------------------------------------

    @override
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        self.require_member()
        return self._mailroom.send(_flat(tensors[0]), dst, tag)

    @override
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        self.require_member()
        return self._mailroom.receive(tensors[0], src, tag)

    @override
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        self.require_member()
        return self._mailroom.receive(tensors[0], None, tag)

    # The end ----------------------------------------------------------------------------------------------------------------------------

    @override
    def begin_call(self, timeout_s: float) -> None:
        self._engine.set_timeout(timeout_s)

    @override
    def is_half_way(self) -> bool:
        return self._engine.is_half_way

    @override
    def give_up(self) -> None:
        self._engine.close()

    @override
    def close(self) -> None:
        self._mailroom.close()
        self._engine.close()


def _flat(tensor: Tensor) -> Tensor:
    return flatten(tensor, "shm")


def _unable(has_kernel: bool) -> str | None:
    """Why this rank cannot take part."""
    if has_kernel or platform.machine() == "x86_64":
        return None
    return f"there is no C compiler, and {platform.machine()} does not keep the order of writes, which Python alone relies on"


def _numbers(flat: Tensor, op: Op) -> tuple[Tensor, Op]:
    """What can be combined, and how: booleans are bytes, of which any and all are the largest and the smallest."""
    if flat.dtype is torch.bool:
        return flat.view(torch.uint8), _BYTES_OF_BOOLS.get(op, op)
    if flat.dtype not in DTYPES:
        raise RuntimeError(f"backend shm can reduce {', '.join(map(str, DTYPES))} and torch.bool, but not {flat.dtype}")
    if (flat.is_floating_point() and op in (Op.BAND, Op.BOR, Op.BXOR)) or (not flat.is_floating_point() and op is Op.AVG):
        raise RuntimeError(f"backend shm cannot reduce {flat.dtype} by {op.name}")
    return flat, op
