"""Optimizers of PyTorch whose update is one fused kernel: chosen where the user has left the choice open, and switched off on the device.

The kernels leave an update out when a flag on the device says so; `torch.amp.GradScaler` hands it to them as the attribute `found_inf`. That
protocol is in no reference of PyTorch, so it stands here alone, for the four optimizers that are known to follow it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_FOLLOW = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_CHOSEN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_DIVIDE = (torch.optim.Adam, torch.optim.AdamW)


def prefer_fused(optimizer: torch.optim.Optimizer) -> None:
    """Has `optimizer` update parameters on a GPU by its fused kernel, if the user asked for no implementation and it has made no update."""
    if type(optimizer) in _CHOSEN and not optimizer.state and all(_is_open(group) for group in optimizer.param_groups):
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["fused"] = True


def _is_open(group: dict[str, Any]) -> bool:
    asked = group.get("fused") is not None or group.get("foreach") is not None or group.get("capturable") or group.get("differentiable")
    return not asked and all(parameter.is_cuda and parameter.is_floating_point() for parameter in group["params"])


def switches_off_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `switched_off_if` works for `optimizer`.

    Not where momentum is to be made in this very step: left out, it would stay as it came from memory.
    """
    return type(optimizer) in _FOLLOW and all(
        group.get("fused")
        and (not group.get("momentum") or all(optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in group["params"]))
        for group in optimizer.param_groups
    )


def is_same_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update of `optimizer` has the same bits when it is made for some parameters after others."""
    return type(optimizer) in _CHOSEN


def divides_the_same(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` has the bits of a division before it when it divides the gradients itself.

    SGD has not: it goes on with more digits than float32 keeps (H200, torch 2.11).
    """
    return type(optimizer) in _DIVIDE


@contextmanager
def switched_off_if(optimizer: Any, flag: Tensor | None, divisor: Tensor | None = None) -> Iterator[None]:
    """Inside the `with` block `optimizer.step()` changes nothing if `flag`, a float32 scalar on the device, is 1; else it divides the gradients by
    `divisor` first, likewise, in the very kernel: where it `divides_the_same`, with the bits of a division before.
    """
    optimizer.found_inf, optimizer.grad_scale = flag, divisor
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale
