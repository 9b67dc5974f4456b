"""The engine in Python alone: where there is no compiler, and what the C kernel is measured against.

A round: a rank writes into its slot of the round's parity, says so, and waits until all have said so. The slots of one parity are free again when
the next round is complete. In the first round of a call the ranks also say what they are about to do, and go no further if they disagree.

An all-reduce of more than `AT_ONCE_BYTES` goes block by block, each cut into a part a rank: every rank combines its part of a block while the
others fetch the parts of the block before, so that a block costs one round.
"""

import struct
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hora.comm.backends.shm.calls import GONE, HAS_LEFT, MISMATCH, TIMED_OUT, explain
from hora.comm.backends.shm.engine import AT_ONCE_BYTES, CallWords, Engine, Op
from hora.comm.backends.shm.segment import CALL_WORDS, CALLS, CHANNEL_HEAD_BYTES, GEN, SEQ, Segment

_SPINS, _YIELDS, _PAUSE_S, _LOOK_S = 100, 2000, 1e-4, 1e-2
_MASK = 2**32 - 1
_LINE = 64
_HALVES = (torch.float16, torch.bfloat16)
_WRITTEN, _READ = 0, 64

_COMBINE: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add, Op.AVG: torch.add, Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor,
}  # fmt: skip


class Pure(Engine):
    """Carries out collectives with torch's operations on views of the segment."""

    def __init__(self, segment: Segment):
        self.segment = segment
        self._rank, self._size = segment.rank, segment.size
        self._round = 0
        self._timeout_s = self._said_s = 0.0
        self._closing = self._is_half_way = False
        self._seqs = (
            segment.bytes[segment.line(0) : segment.line(segment.size)].view(torch.int32).view(segment.size, -1)[:, SEQ // 4].numpy()
        )
        # Not by struct.pack_into, which writes zeros first, for all to see.
        self._counts = segment.bytes.view(torch.int64).numpy()
        self._gen = segment.bytes[GEN : GEN + 4].view(torch.int32).numpy()

    @override
    def barrier(self, call: CallWords) -> None:
        self._complete(call)

    @override
    def all_reduce(self, tensor: Tensor, op: Op, call: CallWords) -> None:
        if tensor.nbytes <= AT_ONCE_BYTES:
            self._give(0, tensor)
            self._complete(call)
            _combine(tensor, [self._given(rank, 0, tensor) for rank in range(self._size)], op)
            return
        block = self._piece(tensor.element_size()) * self._size
        before: Tensor | None = None
        for index, piece in enumerate([*tensor.split(block), None]):
            if piece is not None:
                for rank, part in self._parts(piece):
                    if rank != self._rank:
                        self._give(self._at(piece, part), part)
            self._complete(call if index == 0 else None)
            number = self._round
            if piece is not None:
                self._combine_my_part(piece, op)
            if before is not None:
                for rank, part in self._parts(before):
                    if rank != self._rank:
                        part.copy_(self._view(self.segment.slot(rank, number) + self.segment.slot_bytes, part))
            before = piece

    def _combine_my_part(self, piece: Tensor, op: Op) -> None:
        """This rank's part of a block, from all ranks, for all ranks."""
        parts = dict(self._parts(piece))
        if self._rank not in parts:
            return
        mine = parts[self._rank]
        given = [mine if rank == self._rank else self._given(rank, self._at(piece, mine), mine) for rank in range(self._size)]
        result = self._view(self.segment.slot(self._rank, self._round + 1) + self.segment.slot_bytes, mine)
        _combine(result, given, op)
        mine.copy_(result)

    @override
    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Op, call: CallWords) -> None:
        piece = self._piece(output.element_size())
        stride = piece * output.element_size()
        for index, to in enumerate(_pieces(output, piece)):
            mine = [part[index * piece : index * piece + to.numel()] for part in parts]
            for rank in range(self._size):
                if rank != self._rank:
                    self._give(rank * stride, mine[rank])
            self._complete(call if index == 0 else None)
            given = [
                mine[rank] if rank == self._rank else self._given(rank, self._rank * stride, to) for rank in range(self._size)
            ]  # fmt: skip
            _combine(to, given, op)

    @override
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, call: CallWords) -> None:
        size = self.segment.slot_bytes
        for index, piece in enumerate(_pieces(tensor.view(torch.uint8), size)):
            self._give(0, piece)
            self._complete(call if index == 0 else None)
            for rank, output in enumerate(outputs):
                to = output.view(torch.uint8)[index * size :][: piece.numel()]
                if to.data_ptr() != piece.data_ptr():
                    to.copy_(piece if rank == self._rank else self._given(rank, 0, piece))

    @override
    def post(self, tensor: Tensor, call: CallWords) -> None:
        self._give(0, tensor)
        self._say(call)

    @override
    def collect(self, outputs: Sequence[Tensor]) -> None:
        self._await_all()
        self._require_same_call()
        for rank, output in enumerate(outputs):
            output.copy_(self._given(rank, 0, output))

    @override
    def broadcast(self, tensor: Tensor, root: int, call: CallWords) -> None:
        for index, piece in enumerate(_pieces(tensor.view(torch.uint8), self.segment.slot_bytes)):
            if self._rank == root:
                self._give(0, piece)
            self._complete(call if index == 0 else None)
            if self._rank != root:
                piece.copy_(self._given(root, 0, piece))

    @override
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: CallWords) -> None:
        sent, received = ([part.view(torch.uint8) for part in parts] for parts in (inputs, outputs))
        longest = self._agree_on_sizes([part.numel() for part in sent], [part.numel() for part in received], call)
        piece = self.segment.slot_bytes // self._size // _LINE * _LINE
        for at in range(0, longest, piece):
            for rank, part in enumerate(sent):
                if rank != self._rank:
                    self._give(rank * piece, part[at : at + piece])
            self._complete(None)
            for rank, part in enumerate(received):
                to = part[at : at + piece]
                to.copy_(sent[rank][at : at + piece] if rank == self._rank else self._given(rank, self._rank * piece, to))

    def _agree_on_sizes(self, sizes: list[int], expected: list[int], call: CallWords) -> int:
        """The longest message of any rank to any other."""
        mine = torch.tensor([sizes, expected], device="cpu")
        self._give(0, mine.view(-1))
        self._complete(call)
        sent, awaited = torch.stack([self._given(rank, 0, mine.view(-1)).view(2, -1) for rank in range(self._size)]).unbind(1)
        wrong = (sent != awaited.t()).any(1).nonzero()
        if wrong.numel():
            raise explain(MISMATCH, int(wrong[-1]), self.segment, self._round, self._timeout_s)
        return int(sent.max())

    # Messages ---------------------------------------------------------------------------------------------------------------------------

    @override
    def write(self, dst: int, data: Tensor) -> int:
        channel, capacity = self.segment.channel(self._rank, dst), self.segment.channel_bytes
        written, read = self._count(channel + _WRITTEN), self._count(channel + _READ)
        count = min(data.numel(), capacity - (written - read))
        for place, part in self._ring(channel, written, data[:count]):
            place.copy_(part)
        self._set_count(channel + _WRITTEN, written + count)
        return count

    @override
    def read(self, src: int, data: Tensor) -> int:
        channel = self.segment.channel(src, self._rank)
        written, read = self._count(channel + _WRITTEN), self._count(channel + _READ)
        count = min(data.numel(), written - read)
        for place, part in self._ring(channel, read, data[:count]):
            part.copy_(place)
        self._set_count(channel + _READ, read + count)
        return count

    def _ring(self, channel: int, at: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Where in the ring the parts of `data` stand that begin at byte number `at`."""
        capacity = self.segment.channel_bytes
        ring = self.segment.bytes[channel + CHANNEL_HEAD_BYTES :][:capacity]
        begin = at % capacity
        first = min(data.numel(), capacity - begin)
        yield ring[begin : begin + first], data[:first]
        yield ring[: data.numel() - first], data[first:]

    def _count(self, at: int) -> int:
        return int(self._counts[at // 8])

    def _set_count(self, at: int, count: int) -> None:
        self._counts[at // 8] = count

    # Rounds -----------------------------------------------------------------------------------------------------------------------------

    def _piece(self, itemsize: int) -> int:
        """Elements of the part of a rank that a slot has room for."""
        return self.segment.slot_bytes // self._size // _LINE * _LINE // itemsize

    def _parts(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The part of each rank of a block; the last block may have fewer."""
        return enumerate(block.split(self._piece(block.element_size())))

    @staticmethod
    def _at(block: Tensor, part: Tensor) -> int:
        return part.data_ptr() - block.data_ptr()

    def _give(self, at: int, data: Tensor) -> None:
        """Writes `data` into this rank's slot of the coming round."""
        self._view(self.segment.slot(self._rank, self._round + 1) + at, data).copy_(data)

    def _given(self, rank: int, at: int, like: Tensor) -> Tensor:
        """What `rank` has given in the last round."""
        return self._view(self.segment.slot(rank, self._round) + at, like)

    def _view(self, begin: int, like: Tensor) -> Tensor:
        return self.segment.bytes[begin : begin + like.nbytes].view(like.dtype)

    def _complete(self, call: CallWords | None) -> None:
        """Says that the slot is written, and waits for the others'; with `call`, what this is about."""
        self._is_half_way = True
        self._say(call)
        self._await_all()
        self._is_half_way = False
        if call is not None:
            self._require_same_call()

    def _say(self, call: CallWords | None) -> None:
        self._round += 1
        if call is not None:
            at = self.segment.line(self._rank) + CALLS + self._round % 2 * CALL_WORDS * 8
            struct.pack_into(f"{CALL_WORDS}Q", self.segment.memory, at, *call)
        self._seqs[self._rank] = _signed(self._round)
        self._said_s = time.monotonic()

    def _require_same_call(self) -> None:
        mine = self.segment.call_of(self._rank, self._round)
        for rank in range(self._size):
            if self.segment.call_of(rank, self._round) != mine:
                raise explain(MISMATCH, rank, self.segment, self._round, self._timeout_s)

    def _await_all(self) -> None:
        looked = 0.0
        for spins in range(2**62):
            if not self._missing():
                self._gen[0] = _signed(self._round)
                return
            if spins < _SPINS:
                continue
            time.sleep(0 if spins < _YIELDS else _PAUSE_S)
            waited = time.monotonic() - self._said_s
            if waited - looked > _LOOK_S:
                looked = waited
                self._require_living(waited)

    def _missing(self) -> list[int]:
        """Ranks that have not come to this round; a difference below 2^31 is one forwards."""
        return [rank for rank, seq in enumerate(self._seqs.tolist()) if (seq - self._round) & _MASK >= 2**31]

    def _require_living(self, waited_s: float) -> None:
        if self._closing:
            raise explain(HAS_LEFT, self._rank, self.segment, self._round, self._timeout_s)
        for rank in self._missing():
            if not self.segment.takes_part(rank) and rank in self._missing():  # it may have said its last word, and left, since we looked
                why = HAS_LEFT if self.segment.has_left(rank) else GONE
                raise explain(why, rank, self.segment, self._round, self._timeout_s)
        if waited_s > self._timeout_s and (missing := self._missing()):
            raise explain(TIMED_OUT, missing[-1], self.segment, self._round, self._timeout_s)

    @property
    @override
    def is_half_way(self) -> bool:
        return self._is_half_way

    @override
    def set_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    @override
    def close(self) -> None:
        self._closing = True
        self.segment.leave()


def _signed(number: int) -> int:
    """The number as the 32 bits of a round, read with a sign."""
    return (number + 2**31 & _MASK) - 2**31


def _pieces(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Pieces of `size` elements; one empty one of nothing, for a call is a round at least."""
    return tensor.split(size) if tensor.numel() else [tensor]


def _combine(to: Tensor, given: Sequence[Tensor], op: Op) -> None:
    """All of `given` in the order of the ranks; half precision in float32, rounded once."""
    half = to.dtype in _HALVES
    total = given[0].float() if half else given[0].clone()
    for values in given[1:]:
        _COMBINE[op](total, values.float() if half else values, out=total)
    to.copy_(total.div_(len(given)) if op is Op.AVG else total)
