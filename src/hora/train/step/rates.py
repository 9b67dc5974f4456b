"""Learning rates of an optimizer as numbers on its device, so that a captured update reads the one in force when it is replayed.

A fused kernel reads a rate on the device as float32. So that eager and captured updates have the same bits, both read it there.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class LearningRates:
    """The rates of all groups of `optimizer`; outside `lent` its groups hold what the user has put there."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._values: list[float] = []
        self._tensors: list[Tensor] = []

    def refresh(self) -> None:
        """Brings the numbers on the device up to date."""
        for index, group in enumerate(self._optimizer.param_groups):
            value = float(group["lr"])
            if index == len(self._values):
                self._values.append(value)
                self._tensors.append(torch.full((), value, device=self._device))
            elif self._values[index] != value:
                self._values[index] = value
                self._tensors[index].fill_(value)

    @contextmanager
    def lent(self, *, to_capture: bool = False) -> Iterator[None]:
        """Inside the `with` block the groups hold the numbers on the device; `to_capture`: and optimizers know that they are captured."""
        self.refresh()
        groups = self._optimizer.param_groups
        before: list[dict[str, Any]] = [{name: group[name] for name in ("lr", "capturable") if name in group} for group in groups]
        for group, rate in zip(groups, self._tensors, strict=True):
            group["lr"] = rate
            if to_capture and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    def other_settings(self) -> tuple[Any, ...]:
        """What else an update depends on: a captured one keeps what it was captured with."""
        return tuple(
            tuple((name, _frozen(value)) for name, value in group.items() if name not in _NO_SETTINGS and not isinstance(value, Tensor))
            for group in self._optimizer.param_groups
        )


_NO_SETTINGS = ("lr", "params", "param_names", "capturable")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value if isinstance(value, Hashable) else repr(value)
