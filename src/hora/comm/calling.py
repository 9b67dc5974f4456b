"""How a collective runs: the ranks agree on what it is, it begins, and its result or its failure is made of what the backend says."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from hora.comm.algorithms.base import Begun
from hora.comm.dtypes import dtype_name
from hora.comm.members import Members
from hora.comm.work import Work

_Result = TypeVar("_Result")


class What(NamedTuple):
    """What a rank is about to do. `details` are None where the ranks have agreed on it already."""

    kind: str
    details: str | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.details}{f' {self.name!r}' if self.name else ''}"


def say(tensor: Tensor) -> str:
    """Type and shape in a few words."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def run(
    here: Members,
    what: What,
    tensors: Sequence[Tensor],
    start: Callable[..., Begun],
    finish: Callable[[], _Result],
    async_op: bool,
) -> _Result | Work[_Result]:
    """Begins a collective; its result, or with `async_op` the handle of it."""
    return run_planned(here, what, tensors, lambda: (start, finish), async_op)


def run_planned(
    here: Members,
    what: What,
    tensors: Sequence[Tensor],
    begin: Callable[[], tuple[Callable[..., Begun], Callable[[], _Result]]],
    async_op: bool,
) -> _Result | Work[_Result]:
    """As `run`, for a collective that ranks must talk about (`begin`) before it can start."""
    call = here.progress.begin(what.kind, tensors)
    if what.details is not None and here.check_calls and here.world_size > 1:
        here.roll_call.begin(str(what), call, waits=True).wait()
    try:
        start, finish = begin()
        begun = start(async_op=async_op)
    except RuntimeError as error:
        raise here.progress.explain(call, error) from error
    work = Work(begun, call, here.progress, finish)
    if not async_op:
        return work.wait()
    here.progress.step_aside()
    return work
