"""What a user hands to `backward`: refused where it has no gradient, or no weight."""

import math
from collections.abc import Sequence
from typing import Any, SupportsFloat

from torch import Tensor

from hora.errors import ConfigError


def require_losses(losses: Sequence[Any]) -> None:
    """Refuses what has no backward, before the other ranks are told of one."""
    for loss in losses or (None,):
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigError(
                f"backward takes the summed loss as a scalar that depends on the parameters, or a list of such, but got {found}"
                + (", which needs no gradient" if isinstance(loss, Tensor) and not loss.requires_grad else "")
            )


def require_weight(weight: float | Tensor) -> None:
    """Refuses what a micro-batch cannot weigh.

    Raises:
        ConfigError: it is no finite number from 0; of a tensor on a GPU only whether it has one element is looked at.
    """
    if not isinstance(weight, (int, float, Tensor, SupportsFloat)):  # in this order: to ask for the last takes longest
        raise ConfigError(f"weight must be a number or a tensor with one element, but is {weight!r} instead")
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise ConfigError(f"weight must be a number or a tensor with one element, but has shape {list(weight.shape)} instead")
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return  # to read it would make the host wait
    value = float(weight.detach() if isinstance(weight, Tensor) else weight)
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"weight must be a finite number from 0, but is {value!r} instead")
