"""How Horovod scales and combines each type: integers in float64 and cut towards zero, booleans as any and all."""

import torch
from torch import Tensor

from hora.comm.reduce_op import ReduceOp
from hora.hvd.negotiation.request import Reduction

_OPS = {
    Reduction.AVERAGE: ReduceOp.SUM,
    Reduction.SUM: ReduceOp.SUM,
    Reduction.MIN: ReduceOp.MIN,
    Reduction.MAX: ReduceOp.MAX,
    Reduction.PRODUCT: ReduceOp.PRODUCT,
}
_OF_BOOLS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}

# What no backend adds up, and what can be taken for it without another result.
_WIDER = {torch.int16: torch.int32}


def scale(tensor: Tensor, factor: float) -> None:
    """Multiplies `tensor` in place."""
    if factor == 1.0 or tensor.dtype is torch.bool:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).trunc_())


def divide(tensor: Tensor, divisor: int, factor: float) -> None:
    """Divides `tensor` by `divisor` and multiplies it by `factor`, in place."""
    if tensor.is_floating_point() and factor == 1.0:
        tensor.div_(divisor)  # a mean is the nearest number, as under DistributedDataParallel, which a product with 1 / divisor is not
    else:
        scale(tensor, factor / divisor)


def reduce_op_for(op: int, dtype: torch.dtype) -> ReduceOp:
    """What the collective below is to do."""
    found = _OPS[Reduction(op)]
    return _OF_BOOLS.get(found, found) if dtype is torch.bool else found


def combinable(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy in a type that backends combine."""
    return tensor.to(_WIDER[tensor.dtype]) if tensor.dtype in _WIDER else tensor
