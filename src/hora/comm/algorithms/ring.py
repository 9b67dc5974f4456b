"""Algorithm `ring`: chunks go round a ring of ranks, summed on the way, then whole; each rank sends 2(n - 1)/n of the data, whatever n.

The schedule is `plan.ring`. Each chunk travels in pieces, so that one piece is added up while the next is on its way. 2(n - 1)
messages in a row make it slow for small tensors. Values are added in the dtype of the tensor, in half precision too, each chunk in its own order
of ranks; all ranks get the same bits, because a sum is made once and then copied.

All work is done when a call returns, with `async_op` too (on a GPU: in the order of the current stream).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora.comm.algorithms.base import Begun
from hora.comm.algorithms.exchange import exchange
from hora.comm.algorithms.native import Native
from hora.comm.algorithms.values import COMBINE, as_bytes, as_numbers
from hora.comm.groups import Groups
from hora.comm.reduce_op import ReduceOp
from hora.plan import ring
from hora.plan.logical import split
from hora.plan.ring import Move

_PIECE_BYTES = 1024 * 1024


class Ring(Native):
    """All-reduce, reduce-scatter and all-gather in a ring; what has no sum and no parts goes as in `native`."""

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        group = groups.world
        _go_round(_chunks(as_numbers(tensor), group.size()), ring.all_reduce(group.rank(), group.size()), group, op)
        return ()

    @override
    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        group, rank, size = groups.world, groups.world.rank(), groups.world.size()
        chunks = _chunks(as_numbers(tensor).clone(), size)  # sums on their way need a place, and `tensor` is the caller's
        _go_round(chunks, ring.scatter_reduce(size, owned=rank), group, op)
        as_numbers(output).copy_(chunks[rank])
        return ()

    @override
    def all_gather(self, output: Tensor, tensor: Tensor, groups: Groups, *, async_op: bool) -> Begun:
        group, rank, size = groups.world, groups.world.rank(), groups.world.size()
        chunks = _chunks(as_bytes(output), size)
        chunks[rank].copy_(as_bytes(tensor))
        _go_round(chunks, ring.all_gather(size, owned=rank), group)
        return ()


def reduce_chunks(tensor: Tensor, op: ReduceOp, group: dist.ProcessGroup) -> Tensor:
    """The first half of the all-reduce; returns the chunk of `tensor` that has its result now, and spoils the others.

    Collective: all ranks of `group` call it.
    """
    rank, size = group.rank(), group.size()
    owned, chunks = ring.owned_after_reduce(rank, size), _chunks(tensor, size)
    _go_round(chunks, ring.scatter_reduce(size, owned), group, op)
    return chunks[owned]


def gather_chunks(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The second half: gives all ranks the chunks that `reduce_chunks` left with each, as they are now.

    Collective: all ranks of `group` call it.
    """
    rank, size = group.rank(), group.size()
    _go_round(_chunks(tensor, size), ring.all_gather(size, ring.owned_after_reduce(rank, size)), group)


def _chunks(tensor: Tensor, size: int) -> list[Tensor]:
    """One a rank, the larger first; the last ones are empty where there are fewer elements than ranks."""
    places = (split(range(tensor.numel()), size, index) for index in range(size))
    return [tensor[place.start : place.stop] for place in places]


def _go_round(chunks: Sequence[Tensor], moves: Sequence[Move], group: dist.ProcessGroup, op: ReduceOp = ReduceOp.SUM) -> None:
    """Carries out `moves` on `chunks`, in place.

    What a piece is to be sent on as came in one step ago, as many pieces back as a chunk has: so many can be on their way at once.
    """
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    num_pieces = max(1, -(-chunks[0].numel() * chunks[0].element_size() // _PIECE_BYTES))
    in_flight: deque[tuple[Begun, _Piece]] = deque()
    for piece in _pieces(chunks, moves, num_pieces):
        if len(in_flight) == num_pieces:
            _land(*in_flight.popleft(), op)
        in_flight.append((exchange(piece.sent, right, piece.landing, left, group), piece))
    while in_flight:
        _land(*in_flight.popleft(), op)


class _Piece(NamedTuple):
    """Of one move: what is sent, what is received into, and where it belongs in the end; the last two are one unless it is to be added."""

    sent: Tensor
    landing: Tensor
    home: Tensor


def _pieces(chunks: Sequence[Tensor], moves: Sequence[Move], num_pieces: int) -> Iterator[_Piece]:
    # A place for each number of a piece: chunks differ in length, and so do the places of their pieces.
    spare = chunks[0].new_empty(num_pieces if moves[:1] and moves[0].adds else 0, -(-chunks[0].numel() // num_pieces))
    for move in moves:
        for index in range(num_pieces):
            sent, home = (_cut(chunks[number], num_pieces, index) for number in (move.sent, move.received))
            yield _Piece(sent, spare[index, : home.numel()] if move.adds else home, home)


def _cut(chunk: Tensor, num_pieces: int, index: int) -> Tensor:
    place = split(range(chunk.numel()), num_pieces, index)
    return chunk[place.start : place.stop]


def _land(begun: Begun, piece: _Piece, op: ReduceOp) -> None:
    for work in begun:
        work.wait()
    if piece.landing is not piece.home:
        COMBINE[op](piece.landing, piece.home, out=piece.home)
