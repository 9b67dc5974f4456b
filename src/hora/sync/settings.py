"""What the gradients of a model are summed by: the same on all ranks, and for all optimizers of the model."""

from dataclasses import dataclass, field
from numbers import Integral

import torch

from hora.comm.algorithms.compressed import WIRE_DTYPES
from hora.errors import ConfigError
from hora.sync.checks import Checks


@dataclass(frozen=True)
class SyncSettings:
    """What must be the same for all optimizers of a model."""

    strategy: str = "overlap"
    bucket_cap_bytes: int | None = None
    accumulation_steps: int = 1
    checks: Checks = field(default_factory=Checks)
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.bucket_cap_bytes is not None:
            _require_count("bucket_cap_bytes", self.bucket_cap_bytes)
        _require_count("accumulation_steps", self.accumulation_steps)
        if self.wire_dtype not in (None, *WIRE_DTYPES):
            raise ConfigError(f"wire_dtype must be None or one of {', '.join(map(str, WIRE_DTYPES))}, but is {self.wire_dtype} instead")


def _require_count(name: str, value: object) -> None:
    if not (isinstance(value, Integral) and int(value) >= 1):
        raise ConfigError(f"{name} must be a whole number of at least 1, but is {value!r} instead")
