"""Collectives that one rank calls otherwise than the other: by shape, type, operation, order and number.

Left to itself the backend below computes wrong numbers from some of these, without a word.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import hora
from hora.diag.chaos.journal import Journal

EXIT_CODE = 65
"""EX_DATAERR of sysexits.h: this program gives up on what it was given."""


def _reduce(values: Tensor, op: hora.ReduceOp = hora.ReduceOp.SUM, name: str = "") -> None:
    hora.all_reduce(values, op, name=name)


def _in_order(first: str, second: str) -> None:
    for name in (first, second):
        _reduce(torch.ones(4), name=name)


_Calls = tuple[Callable[[], object], Callable[[], object]]
MISTAKES: dict[str, _Calls] = {
    # what rank 0 does, and what rank 1 does
    "dtype": (lambda: _reduce(torch.ones(6)), lambda: _reduce(torch.ones(6, dtype=torch.int32))),
    "shape": (lambda: _reduce(torch.ones(6)), lambda: _reduce(torch.ones(7))),
    "view": (lambda: _reduce(torch.ones(2, 3)), lambda: _reduce(torch.ones(3, 2))),
    "op": (lambda: _reduce(torch.ones(6)), lambda: _reduce(torch.ones(6), hora.ReduceOp.MAX)),
    "kind": (lambda: _reduce(torch.ones(6)), lambda: hora.broadcast(torch.ones(6), 0)),
    "broadcast dtype": (lambda: hora.broadcast(torch.ones(100), 0), lambda: hora.broadcast(torch.ones(50, dtype=torch.float64), 0)),
    "order": (lambda: _in_order("loss", "accuracy"), lambda: _in_order("accuracy", "loss")),
    "count": (lambda: None, lambda: _reduce(torch.ones(6))),
}


def make(mistake: str, journal: Journal) -> int:
    """Makes the call of this rank; returns the exit code of a program that got through.

    Raises:
        CollectiveError: the ranks call differently.
    """
    _reduce(torch.ones(3))
    journal.note("calling")
    MISTAKES[mistake][hora.rank()]()
    journal.note("passed")
    return EXIT_CODE
