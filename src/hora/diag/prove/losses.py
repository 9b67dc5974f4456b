"""Sees the losses of a script: the value that each backward begins from, and how many terms its mean was taken over."""

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hora.diag.prove.ablation import Ablation
from hora.diag.prove.records import MicroStep

LOSSES: Final = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
)


class Losses:
    """The micro-steps of the step under way.

    Attributes:
        micro_steps: one for each backward since they were last taken.
        running: whether a backward runs (activation checkpoints then call modules again).
    """

    def __init__(self, ablation: Ablation):
        self.micro_steps: list[MicroStep] = []
        self.running = False
        self._ablation = ablation
        self._denominators: list[int] = []
        self._depth = 0

    def install(self) -> None:
        """Wraps torch's functions."""
        torch.autograd.backward = self._watching(torch.autograd.backward)
        for name in LOSSES:
            setattr(F, name, self._noting(getattr(F, name), name))

    def take(self) -> tuple[MicroStep, ...]:
        """What was seen since the last time."""
        taken, self.micro_steps, self._denominators = tuple(self.micro_steps), [], []
        return taken

    def _watching(self, backward: Callable[..., None]) -> Callable[..., None]:
        @wraps(backward)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self.running:
                return backward(tensors, *args, **kwargs)
            self._note_backward([tensors] if isinstance(tensors, Tensor) else list(tensors))
            self.running = True
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                self.running = False

        return watched

    def _note_backward(self, tensors: list[Any]) -> None:
        losses = [tensor.detach().double().sum().item() for tensor in tensors if isinstance(tensor, Tensor)]
        denominators, self._denominators = set(self._denominators), []
        self.micro_steps.append(MicroStep(sum(losses), denominators.pop() if len(denominators) == 1 else None))

    def _noting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if self._depth == 0 and torch.is_grad_enabled() and not self.running:
                self._note_denominator(name, signature.bind(*args, **kwargs))
            self._depth += 1
            try:
                return function(*self._ablation.cast(args), **self._ablation.cast(kwargs))
            finally:
                self._depth -= 1

        return noted

    def _note_denominator(self, name: str, bound: inspect.BoundArguments) -> None:
        bound.apply_defaults()
        given = bound.arguments
        if given.get("reduction") in ("mean", "batchmean") and isinstance(given["input"], Tensor):
            self._denominators.append(denominator(name, given))


def denominator(name: str, given: dict[str, Any]) -> int:
    """How many terms the mean of the loss `name` with these arguments is taken over."""
    if given["reduction"] == "batchmean":
        return len(given["input"])
    target: Tensor = given["target"]
    if name in ("cross_entropy", "nll_loss"):
        if target.is_floating_point():  # probabilities of classes
            return target.numel() // target.shape[-1 if target.dim() == 1 else 1]
        return int((target != given["ignore_index"]).sum())
    return math.prod(torch.broadcast_shapes(given["input"].shape, target.shape))
