"""Averages of the weights over training, beside the model: plain (SMA) or such that forget (EMA).

Each rank averages its own parameters, which are those of all. Nothing is sent.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of the parameters of `model`, in their types.

    Args:
        model: whose parameters are averaged; buffers are left as they are.
        decay: how much of the average stays with each update; None: all updates count alike.
    """

    def __init__(self, model: nn.Module, decay: float | None = None) -> None:
        self._parameters = dict(model.named_parameters())
        self._average = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._decay = decay
        self.num_updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Takes the parameters as they are now; the first time they are the average."""
        self.num_updates += 1
        weight = 1 / self.num_updates if self._decay is None or self.num_updates == 1 else 1 - self._decay
        torch._foreach_lerp_(list(self._average.values()), [parameter.detach() for parameter in self._parameters.values()], weight)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside the `with` block the model has the average, if there is one yet; its own parameters come back afterwards."""
        if not self.num_updates:
            yield
            return
        own = [parameter.detach().clone() for parameter in self._parameters.values()]
        self._set(list(self._average.values()))
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        # Into the same memory, for graphs and optimizers know the parameters by that.
        torch._foreach_copy_(list(self._parameters.values()), values)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"num_updates": self.num_updates, "weights": dict(self._average)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self.num_updates = int(state["num_updates"])
        for name, average in self._average.items():
            average.copy_(state["weights"][name])
