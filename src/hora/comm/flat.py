"""Collectives of a step, on flat contiguous tensors: the ranks have agreed on the step, so these are not agreed on one by one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from torch import Tensor

from hora.comm.algorithms import find_algorithm
from hora.comm.algorithms.base import Begun
from hora.comm.calling import What, run
from hora.comm.operands import session_for
from hora.comm.peer_memory import Divisor, Pulling
from hora.comm.reduce_op import ReduceOp
from hora.comm.session import Session
from hora.comm.work import Work

_NATIVE = find_algorithm("native")


def all_reduce_flat(tensor: Tensor, algorithm: str = "native", *, waits: bool = False) -> Work:
    """Begins to sum `tensor`, flat and contiguous, over all ranks, in place, by `algorithm`.

    Collective: all ranks call it in the same order. `waits`: the caller waits for it now, so that on a CPU no thread need be woken for it.
    """
    here = session_for(tensor)
    start = partial(find_algorithm(algorithm).all_reduce, tensor, ReduceOp.SUM, here.groups)
    return _begin(here, "all_reduce", tensor, tensor, start, waits=waits)


def pull_sum(pulling: Pulling, index: int, divisor: Divisor | None = None) -> Work:
    """Begins to sum tensor number `index` of `pulling` over all ranks, in place, and to divide the sums by `divisor`.

    Collective: all ranks call it in the same order.
    """
    tensor = pulling.tensors[index]

    def start(*, async_op: bool) -> Begun:  # noqa: ARG001
        return cast(Begun, (pulling.begin(index, divisor),))

    return _begin(session_for(tensor), "all_reduce", tensor, tensor, start)


def reduce_scatter_flat(received: Tensor, sent: Tensor, *, waits: bool = False) -> Work:
    """Begins to sum `sent`, of as many parts of equal size as there are ranks, over all ranks, and to leave this rank its part in `received`.

    Collective: all ranks call it in the same order. Both are flat and contiguous. `waits`: as of `all_reduce_flat`.
    """
    here = session_for(received, sent)
    start = partial(_NATIVE.reduce_scatter, received, sent, ReduceOp.SUM, here.groups)
    return _begin(here, "reduce_scatter", received, sent, start, waits=waits)


def all_to_all_flat(received: Tensor, sent: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]) -> Work:
    """Begins to send the part of `sent` with the number of a rank to that rank, as `all_to_all` where the sizes are known everywhere.

    Collective: all ranks call it in the same order.

    Args:
        received: `[sum(received_sizes)]`, contiguous; overwritten with the parts of the ranks.
        sent: `[sum(sizes)]`, contiguous; belongs to the group until the work is done.
        received_sizes: elements that come from each rank.
        sizes: elements that go to each rank.
    """
    here = session_for(received, sent)
    start = partial(_NATIVE.all_to_all, received, sent, received_sizes, sizes, here.groups)
    return _begin(here, "all_to_all", received, sent, start)


def all_gather_flat(received: Tensor, sent: Tensor, *, waits: bool = False) -> Work:
    """Begins to put the `sent` of every rank, all of one size, behind one another into `received`; both are flat and contiguous.

    Collective: all ranks call it in the same order. `waits`: as of `all_reduce_flat`.
    """
    here = session_for(received, sent)
    start = partial(_NATIVE.all_gather, received, sent, here.groups)
    return _begin(here, "all_gather", received, sent, start, waits=waits)


def _begin(here: Session, kind: str, received: Tensor, sent: Tensor, start: Callable[..., Begun], *, waits: bool = False) -> Work:
    """The handle of a collective, which with `waits` is done on a CPU when that is given."""
    in_thread = not waits or sent.device.type != "cpu"

    def begin(*, async_op: bool) -> Begun:
        return start(async_op=async_op and in_thread)

    work = run(here, What(kind), [sent], begin, lambda: received, True)
    assert isinstance(work, Work)
    return work
