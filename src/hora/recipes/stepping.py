"""How a recipe's trainer makes its updates: with `TrainStep`, unless whoever makes the trainer wants another way, as `hora compare` does."""

from typing import Any, Protocol

import torch
from torch import nn

from hora.sync.optimizer import DistributedOptimizer
from hora.train.step.compiling import Compile
from hora.train.step.forward import LossFunction
from hora.train.step.train_step import TrainStep


class StepMaker(Protocol):
    """Makes what a trainer calls with each global batch."""

    def __call__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        *,
        strategy: str,
        clip_norm: float | None,
        precision: str,
        compile: Compile,  # noqa: A002 (what torch calls it)
        capture: bool,
    ) -> Any:
        """A `TrainStep` of the model, or what serves a trainer as one."""


def make_train_step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    *,
    strategy: str,
    clip_norm: float | None,
    precision: str,
    compile: Compile,  # noqa: A002 (what torch calls it)
    capture: bool,
) -> TrainStep:
    """A `TrainStep` with a `DistributedOptimizer`, as a recipe's configuration describes them. Collective."""
    distributed = DistributedOptimizer(optimizer, model, strategy=strategy, clip_norm=clip_norm)
    return TrainStep(model, loss_fn, distributed, precision=precision, compile=compile, capture="auto" if capture else False)
