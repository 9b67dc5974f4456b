"""How tensors are looked at on their way: as numbers to combine, or as bytes to move; and what combines two."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hora.comm.reduce_op import ReduceOp

COMBINE: Mapping[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


def as_numbers(tensor: Tensor) -> Tensor:
    """Gloo adds up the bytes of booleans as they are: fine for the minimum, the maximum and the product of zeros and ones."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """What is only moved travels as bytes: backends refuse some types (Gloo int16, NCCL complex) that they need not look into."""
    return tensor.view(torch.uint8)
