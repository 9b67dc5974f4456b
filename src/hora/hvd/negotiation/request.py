"""What a rank is ready for: one operation, by name, on one tensor or on several that belong together."""

import math
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from hora.comm.dtypes import DTYPES


class Kind(StrEnum):
    """The operations, by the words that Horovod's errors have for them."""

    ALLREDUCE = "ALLREDUCE"
    ALLGATHER = "ALLGATHER"
    BROADCAST = "BROADCAST"
    ALLTOALL = "ALLTOALL"
    REDUCESCATTER = "REDUCESCATTER"
    BARRIER = "BARRIER"
    JOIN = "JOIN"


class Reduction(IntEnum):
    """How values are combined, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Key = tuple[int, str]
"""Under which an operation is met: its process set, and its name."""


class Part(NamedTuple):
    """Type and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@lru_cache(4096)
def _size_bytes(parts: tuple[Part, ...]) -> int:
    return sum(part.size_bytes for part in parts)


class Request(NamedTuple):
    """One operation; a tuple, for one is made and compared for every call.

    Attributes:
        kind: which operation.
        name: by which the ranks meet.
        set_id: process set.
        parts: the tensors.
        device: "cpu" or "cuda".
        op: how values are combined, of those that combine.
        prescale: by which values are multiplied before.
        postscale: by which the result is multiplied.
        root: rank whose values count, of a broadcast.
        splits: how many rows go to each rank, of an ALLTOALL that says so; differs between ranks.
        labels: what the tensors are called, where the name says too little.
    """

    kind: Kind
    name: str
    set_id: int = 0
    parts: tuple[Part, ...] = ()
    device: str = "cpu"
    op: int = Reduction.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        """Under which it is met."""
        return self.set_id, self.name

    @property
    def size_bytes(self) -> int:
        """What its tensors take."""
        return _size_bytes(self.parts)

    def label(self, index: int) -> str:
        """What tensor `index` is called."""
        if index < len(self.labels):
            return self.labels[index]
        return self.name if len(self.parts) == 1 else f"{self.name}[{index}]"

    def to_json(self) -> list[Any]:
        """Plain lists and values."""
        return list(self)

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> "Request":
        """Reads `to_json`.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        kind, name, set_id, parts, device, op, prescale, postscale, root, splits, labels = fields
        read = tuple(Part(str(dtype), tuple(map(int, shape))) for dtype, shape in parts)
        return cls(
            Kind(kind), str(name), int(set_id), read, str(device), int(op), float(prescale), float(postscale), int(root),
            tuple(map(int, splits)), tuple(map(str, labels)),
        )  # fmt: skip
