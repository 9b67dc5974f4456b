"""What collectives tell of themselves, and whom they ask why one failed."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hora.comm.diagnosis import Call
from hora.errors import CollectiveError


class Tracker(Protocol):
    """Knows the collectives of a rank; `comm.progress` for all ranks, or for some of them."""

    def begin(self, kind: str, tensors: Sequence[Tensor], peer: int | None = None) -> Call:
        """Notes that a collective, or a message to or from `peer`, begins."""

    def end(self, call: Call) -> None:
        """Notes that it has ended."""

    def step_aside(self) -> None:
        """Notes that this rank does something else while what it began goes on."""

    def await_end(self, call: Call) -> None:
        """Notes that this rank waits for what it began earlier."""

    def explain(self, call: Call, error: Exception) -> CollectiveError:
        """The error to raise for the failure `error` of `call`."""
