"""How values are combined, and which types of values can be."""

from enum import StrEnum
from typing import NoReturn

import torch

from hora.errors import ConfigError


class ReduceOp(StrEnum):
    """How the values of all ranks become one."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ConfigError(f'unknown reduction "{value}"; choose one of: {", ".join(cls)}')


# What both Gloo and NCCL reduce.
REDUCIBLE_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Refuses what cannot be combined, or not without a surprise.

    Raises:
        ConfigError: says what to do instead.
    """
    if dtype not in REDUCIBLE_DTYPES:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in REDUCIBLE_DTYPES))
        raise ConfigError(f"tensors of {dtype} cannot be combined; convert to one of: {names}")
    if op is ReduceOp.MEAN and not dtype.is_floating_point:
        raise ConfigError(f"the mean of {dtype} would be rounded; convert to a floating-point type first, or take the sum")
    if op is ReduceOp.SUM and dtype is torch.bool:
        raise ConfigError("a sum of torch.bool would be cut off at 1; convert to an integer type to count, or take the maximum for 'any'")
