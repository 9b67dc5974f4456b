"""Tensors of which each rank has a part (`DTensor`), as `fully_shard` and tensor parallelism make them.

Collectives and optimizers of Hora's work on whole tensors and refuse these; a checkpoint puts them together. The part of torch that makes them takes
long to load and is not loaded here: where nobody has, there is no such tensor.
"""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from hora.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

LEAVE_IT_TO_FSDP = (
    "fully_shard (FSDP2) sums their gradients itself, so use the plain optimizer, and make ranks the same before fully_shard; or leave fully_shard "
    'out (strategy="sharded" deals out the state of the optimizer)'
)


def as_dtensor(tensor: Tensor) -> "DTensor | None":
    """`tensor`, if it is one of which each rank has a part."""
    if type(tensor) is Tensor or "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def require_whole(named: Iterable[tuple[str, Tensor]], rule: str, advice: str = LEAVE_IT_TO_FSDP) -> None:
    """Refuses tensors of which each rank has a part.

    Args:
        named: tensors with what the message calls them.
        rule: why they are no good here.
        advice: what to do.

    Raises:
        ConfigError: names the first one.
    """
    for name, tensor in named:
        if as_dtensor(tensor) is not None:
            raise ConfigError(f"{rule}, but {name} is a DTensor, of which each rank has a part: {advice}")
