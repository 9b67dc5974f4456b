"""All-reduce with half the bytes: values travel as bfloat16 or float16, and are added up in their own type.

Each rank sends every other one its chunk in the narrow type, adds up what it gets in the order of the ranks, and sends the sum in the narrow
type to all: an all-to-all and an all-gather. A value is rounded twice whatever the number of ranks; sums made in the narrow type on the way
round a ring are rounded once a rank. All ranks get the same bits.
"""

import torch
from torch import Tensor
from typing_extensions import override

from hora.comm.algorithms.base import Begun
from hora.comm.algorithms.native import Native
from hora.comm.groups import Groups
from hora.comm.reduce_op import ReduceOp
from hora.errors import ConfigError

WIRE_DTYPES = (torch.bfloat16, torch.float16)


def check_compressible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Refuses what cannot travel in another type.

    Raises:
        ConfigError: says what can.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN) or dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"wire_dtype is for the sum or the mean of float32 or float64, but here {dtype} is to be reduced by {op.value}")


class Compressed(Native):
    """Sums of float32 and float64 that travel as `wire_dtype`; all is done when a call returns.

    Raises:
        ConfigError: nothing travels as `wire_dtype`.
    """

    def __init__(self, wire_dtype: torch.dtype):
        if wire_dtype not in WIRE_DTYPES:
            raise ConfigError(f"wire_dtype must be one of {', '.join(map(str, WIRE_DTYPES))}, but is {wire_dtype} instead")
        self._wire_dtype = wire_dtype

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp, groups: Groups, *, async_op: bool) -> Begun:
        assert op is ReduceOp.SUM
        size = groups.world.size()
        if size == 1:
            return ()
        chunk = -(-tensor.numel() // size)
        sent = torch.nn.functional.pad(tensor, (0, chunk * size - tensor.numel())).to(self._wire_dtype)
        received = torch.empty_like(sent)
        self.all_to_all(received, sent, [chunk] * size, [chunk] * size, groups, async_op=False)
        mine = received.view(size, chunk).to(tensor.dtype).sum(0)
        self.all_gather(sent, mine.to(self._wire_dtype), groups, async_op=False)
        tensor.copy_(sent[: tensor.numel()])
        return ()
