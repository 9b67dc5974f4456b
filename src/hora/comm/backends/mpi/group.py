"""The process group of backend mpi: what torch.distributed calls, as nonblocking calls of MPI that are waited for with a deadline.

MPI itself moves and adds up; what it cannot do is done here: half precision (added up in float32, rounded once), the mean, tensors that are
not contiguous, inputs that are part of the output. Counts beyond 2^31 are mpi4py's to pass on, which it does from version 4.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora.comm.backends.mpi.calls import HALVES, TEXT_BYTES, Call, explain, mpi_names
from hora.comm.backends.mpi.library import Library
from hora.comm.backends.mpi.message import FromAnybody, Message, bytes_of
from hora.comm.backends.python_group import flatten, op_name, overlap, put_back, require_sizes
from hora.comm.backends.queued import Failed, Mismatched, QueuedGroup


class MpiGroup(QueuedGroup):
    """Some of MPI's ranks, with tensors on the CPU.

    Collective: the members make it together.

    Args:
        library: MPI.
        members: their world ranks, in the order of the group.
        timeout: of each call that does not give its own.
    """

    def __init__(self, library: Library, members: Sequence[int], timeout: timedelta):
        super().__init__(list(members).index(library.rank), len(members), timeout)
        self._library, self._mpi, self._members = library, library.mpi, list(members)
        self._comm = library.assemble(members, self._timeout_s)
        self._deadline_s = self._timeout_s
        self._call = Call("")

    @override
    def getBackendName(self) -> str:
        return "mpi"

    # Sums -------------------------------------------------------------------------------------------------------------------------------

    @override
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        op = op_name(opts.reduceOp, "mpi") if opts is not None else "SUM"

        def act() -> None:
            for tensor in tensors:
                self._all_reduce(tensor, op)

        return self.run(act, tensors, opts)

    allreduce_coalesced = allreduce

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        flat = _flat(tensor)
        datatype, operation = self._names(flat, op)
        self._agree(Call("all_reduce", flat.nbytes, flat.dtype, op))
        numbers = _wide(flat)
        self._finish(self._comm.Iallreduce, self._mpi.IN_PLACE, [bytes_of(numbers), numbers.numel(), datatype], operation)
        self._put_result(tensor, numbers, op)

    @override
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        op, root = op_name(opts.reduceOp, "mpi"), opts.rootRank

        def act() -> None:
            for tensor in tensors:
                self._reduce(tensor, op, root)

        return self.run(act, tensors, opts)

    def _reduce(self, tensor: Tensor, op: str, root: int) -> None:
        flat = _flat(tensor)
        datatype, operation = self._names(flat, op)
        self._agree(Call("reduce", flat.nbytes, flat.dtype, op, root))
        numbers = _wide(flat)
        ours = [bytes_of(numbers), numbers.numel(), datatype]
        given, taken = (self._mpi.IN_PLACE, ours) if self._rank == root else (ours, None)
        self._finish(self._comm.Ireduce, given, taken, operation, root)
        if self._rank == root:
            self._put_result(tensor, numbers, op)

    @override
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        op = op_name(opts.reduceOp, "mpi")

        def act() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                require_sizes("reduce_scatter", [part.numel() for part in parts], [output.numel()] * self._size)
                self._reduce_scatter(output, torch.cat([_flat(part) for part in parts]), op)

        return self.run(act, outputs, opts)

    @override
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    @override
    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        op = op_name(opts.reduceOp, "mpi") if opts is not None else "SUM"

        def act() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, _flat(tensor), op)

        return self.run(act, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: str) -> None:
        datatype, operation = self._names(tensor, op)
        require_sizes("reduce_scatter", [tensor.numel()], [output.numel() * self._size])
        self._agree(Call("reduce_scatter", output.nbytes, tensor.dtype, op))
        numbers = _wide(tensor)
        # The output may be one of the inputs, which MPI forbids.
        result = numbers.new_empty(output.numel())
        given, taken = ([bytes_of(each), each.numel(), datatype] for each in (numbers, result))
        self._finish(self._comm.Ireduce_scatter, given, taken, [result.numel()] * self._size, operation)
        self._put_result(output, result, op)

    def _names(self, flat: Tensor, op: str) -> tuple[Any, Any]:
        datatype, operation = mpi_names(flat.dtype, op)
        return getattr(self._mpi, datatype), getattr(self._mpi, operation)

    def _put_result(self, tensor: Tensor, numbers: Tensor, op: str) -> None:
        if op == "AVG":
            numbers.div_(self._size)
        put_back(tensor, numbers)

    # Copies -----------------------------------------------------------------------------------------------------------------------------

    @override
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        root = opts.rootRank

        def act() -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                self._agree(Call("broadcast", flat.nbytes, root=root))
                self._finish(self._comm.Ibcast, self._bytes(flat), root)
                put_back(tensor, flat)

        return self.run(act, tensors, opts)

    @override
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def act() -> None:
            for received, sent in zip(outputs, inputs, strict=True):
                require_sizes("all_gather", [output.nbytes for output in received], [sent.nbytes] * self._size)
                flat = _flat(sent)
                whole = flat.new_empty(self._size * flat.numel())
                self._all_gather(whole, flat)
                for output, part in zip(received, self._cut(whole), strict=True):
                    put_back(output, part)

        return self.run(act, outputs, opts)

    @override
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    @override
    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def act() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = _flat(output)
                require_sizes("all_gather", [flat.nbytes], [tensor.nbytes * self._size])
                self._all_gather(flat, _flat(tensor))
                put_back(output, flat)

        return self.run(act, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, whole: Tensor, sent: Tensor) -> None:
        """Fills `whole`; `sent` may be its part of this rank, as FSDP has it, which MPI wants to be told."""
        self._agree(Call("all_gather", sent.nbytes))
        in_place = sent.nbytes > 0 and sent.data_ptr() == whole.data_ptr() + self._rank * sent.nbytes
        if not in_place and overlap(whole, sent):
            sent = sent.clone()
        self._finish(self._comm.Iallgather, self._mpi.IN_PLACE if in_place else self._bytes(sent), self._bytes(whole))

    @override
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        def act() -> None:
            taken = torch.empty(sum(output.nbytes for output in outputs), dtype=torch.uint8, device="cpu")
            given = torch.cat([_raw(tensor) for tensor in inputs])
            sizes = [output.nbytes for output in outputs]
            self._exchange(taken, sizes, given, [tensor.nbytes for tensor in inputs])
            for output, part in zip(outputs, taken.split(sizes), strict=True):
                put_back(output, part.clone().view(output.dtype))  # a part may begin where its type must not

        return self.run(act, outputs, opts)

    @override
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        def act() -> None:
            taken, given = _flat(output), _flat(tensor)
            if overlap(taken, given):
                given = given.clone()
            self._exchange(_raw(taken), self._sizes(output, output_sizes), _raw(given), self._sizes(tensor, sizes))
            put_back(output, taken)

        return self.run(act, [output], opts)

    alltoall_base = all_to_all_single

    def _sizes(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        """Bytes for each rank: `rows` rows, or as many for each."""
        if not rows:
            _require_divisible(tensor.numel(), self._size)
            return [tensor.nbytes // self._size] * self._size
        row = tensor.nbytes // max(1, tensor.size(0))
        return [row * count for count in rows]

    def _exchange(self, taken: Tensor, taken_sizes: list[int], given: Tensor, given_sizes: list[int]) -> None:
        """Sends the r-th piece of `given` to rank r, which has told how much it expects: MPI would not look."""
        self._agree(Call("all_to_all", -1))
        expected = torch.empty(self._size, dtype=torch.int64, device="cpu")
        self._finish(self._comm.Ialltoall, self._bytes(torch.tensor(taken_sizes, device="cpu")), self._bytes(expected))
        wrong = torch.tensor([int(expected.tolist() != given_sizes)], dtype=torch.uint8, device="cpu")
        self._finish(self._comm.Iallreduce, self._mpi.IN_PLACE, [bytes_of(wrong), 1, self._mpi.UINT8_T], self._mpi.MAX)
        if wrong.item():
            raise Mismatched(
                "all ranks must expect what the others send in all_to_all, but what one sends and another expects differ in size"
            )
        self._finish(
            self._comm.Ialltoallv,
            [bytes_of(given), given_sizes, _begins(given_sizes), self._mpi.BYTE],
            [bytes_of(taken), taken_sizes, _begins(taken_sizes), self._mpi.BYTE],
        )

    @override
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        root = opts.rootRank

        def act() -> None:
            sent = _flat(inputs[0])
            self._agree(Call("gather", sent.nbytes, root=root))
            whole = sent.new_empty(self._size * sent.numel()) if self._rank == root else None
            self._finish(self._comm.Igather, self._bytes(sent), None if whole is None else self._bytes(whole), root)
            if whole is not None:
                for output, part in zip(outputs[0], self._cut(whole), strict=True):
                    put_back(output, part)

        return self.run(act, outputs, opts)

    @override
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        root = opts.rootRank

        def act() -> None:
            taken = _flat(outputs[0])
            self._agree(Call("scatter", taken.nbytes, root=root))
            whole = torch.cat([_flat(part) for part in inputs[0]]) if self._rank == root else None
            self._finish(self._comm.Iscatter, None if whole is None else self._bytes(whole), self._bytes(taken), root)
            put_back(outputs[0], taken)

        return self.run(act, outputs, opts)

    def _cut(self, whole: Tensor) -> Sequence[Tensor]:
        """One part a rank."""
        return whole.view(self._size, -1).unbind() if whole.numel() else [whole] * self._size

    @override
    def barrier(self, opts: Any = None) -> dist.Work:
        # To agree is to have waited for all.
        return self.run(lambda: self._agree(Call("barrier")), [], opts)

    # Messages ---------------------------------------------------------------------------------------------------------------------------

    @override
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        def post(data: Any) -> Any:
            return self._comm.Isend([data, self._mpi.BYTE], dst, tag)

        return self._message(post, tensors[0], False, f"send to rank {dst}", tag)

    @override
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        def post(data: Any) -> Any:
            return self._comm.Irecv([data, self._mpi.BYTE], src, tag)

        return self._message(post, tensors[0], True, f"recv from rank {src}", tag)

    @override
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        def post(data: Any) -> Any:
            return FromAnybody(self._mpi, self._comm, data, tag)

        return self._message(post, tensors[0], True, "recv from any rank", tag)

    def _message(self, post: Callable[[Any], Any], tensor: Tensor, receives: bool, what: str, tag: int) -> dist.Work:
        highest = self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB)
        if not 0 <= tag <= highest:
            raise RuntimeError(f"a tag of backend mpi must be from 0 to {highest}, but is {tag} instead")
        self.require_member()
        self.require_whole()
        return Message(self._library, post, tensor, receives, f"{what} with tag {tag}", self._timeout_s, self._members)

    # Calling MPI ------------------------------------------------------------------------------------------------------------------------

    def _bytes(self, flat: Tensor) -> list[Any]:
        return [bytes_of(flat), self._mpi.BYTE]

    def _agree(self, call: Call) -> None:
        """Sees that all ranks are about to make the same call, and that all are there."""
        self._call = call
        digest = call.digest
        words = torch.tensor([digest, -digest], device="cpu")
        # Who is early waits here, for others to come: not as for bytes that are on their way.
        self._finish(self._comm.Iallreduce, self._mpi.IN_PLACE, [bytes_of(words), 2, self._mpi.INT64_T], self._mpi.MAX, size_bytes=0)
        highest, lowest = words.tolist()
        if highest != -lowest:
            told = bytearray(TEXT_BYTES * self._size)
            self._finish(self._comm.Iallgather, [call.told, self._mpi.BYTE], [told, self._mpi.BYTE])
            raise explain(bytes(told), self._size)

    def _finish(self, function: Callable[..., Any], *arguments: Any, size_bytes: int | None = None) -> None:
        what = f"{self._call} ({self._size} ranks)"
        size_bytes = max(0, self._call.size_bytes) if size_bytes is None else size_bytes
        self._library.run(lambda: function(*arguments), what, self._deadline_s, size_bytes, self._members)

    @override
    def begin_call(self, timeout_s: float) -> None:
        self._deadline_s = timeout_s

    @override
    def is_half_way(self) -> bool:
        return self._library.failed

    @override
    def close(self) -> None:
        comm, self._comm = self._comm, None
        # A communicator with a call under way, or that others may still wait for, is left to the end of the process.
        if comm is not None and not self._library.failed and not self._mpi.Is_finalized() and not sys.is_finalizing():
            with self._library.lock:
                comm.Free()
        self._broken = self._broken or Failed("this rank has left the group")


def _flat(tensor: Tensor) -> Tensor:
    return flatten(tensor, "mpi")


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of `tensor`."""
    return _flat(tensor).view(torch.uint8)


def _wide(flat: Tensor) -> Tensor:
    """What MPI adds up: float32 for half precision."""
    return flat.float() if flat.dtype in HALVES else flat


def _begins(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes[:-1])]


def _require_divisible(numel: int, size: int) -> None:
    if numel % size:
        raise RuntimeError(
            f"all_to_all_single without sizes needs as much for each rank, but {numel} elements are not to be divided by {size}"
        )
