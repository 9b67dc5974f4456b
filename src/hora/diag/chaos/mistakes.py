"""Collectives that one rank calls otherwise than the other: by shape, type, operation, order and number.

Left to itself the backend below computes wrong numbers from some of these, without a word.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import hora
from hora.diag.chaos.journal import Journal
from hora.diag.chaos.settings import MISTAKES

EXIT_CODE = 65
"""EX_DATAERR of sysexits.h: this program gives up on what it was given."""


def _reduce(values: Tensor, op: hora.ReduceOp = hora.ReduceOp.SUM, name: str = "") -> None:
    hora.all_reduce(values, op, name=name)


def _in_order(first: str, second: str) -> None:
    for name in (first, second):
        _reduce(torch.ones(4), name=name)


_Calls = tuple[Callable[[], object], Callable[[], object]]
_CALLS: dict[str, _Calls] = dict(
    zip(
        MISTAKES,
        (
            # what rank 0 does, and what rank 1 does
            (lambda: _reduce(torch.ones(6)), lambda: _reduce(torch.ones(6, dtype=torch.int32))),
            (lambda: _reduce(torch.ones(6)), lambda: _reduce(torch.ones(7))),
            (lambda: _reduce(torch.ones(2, 3)), lambda: _reduce(torch.ones(3, 2))),
            (lambda: _reduce(torch.ones(6)), lambda: _reduce(torch.ones(6), hora.ReduceOp.MAX)),
            (lambda: _reduce(torch.ones(6)), lambda: hora.broadcast(torch.ones(6), 0)),
            (lambda: hora.broadcast(torch.ones(100), 0), lambda: hora.broadcast(torch.ones(50, dtype=torch.float64), 0)),
            (lambda: _in_order("loss", "accuracy"), lambda: _in_order("accuracy", "loss")),
            (lambda: None, lambda: _reduce(torch.ones(6))),
        ),
        strict=True,
    )
)


def make(mistake: str, journal: Journal) -> int:
    """Makes the call of this rank; returns the exit code of a program that got through.

    Raises:
        CollectiveError: the ranks call differently.
    """
    _reduce(torch.ones(3))
    journal.note("calling")
    _CALLS[mistake][hora.rank()]()
    journal.note("passed")
    return EXIT_CODE
