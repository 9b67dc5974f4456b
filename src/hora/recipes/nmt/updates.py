"""The optimizers and schedules that a configuration can name."""

import difflib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from hora.errors import ConfigError
from hora.recipes.nmt.config import OptimizerConfig, ScheduleConfig
from hora.train.schedules import Plateau, linear_decay, noam, warmup_cosine, warmup_isqrt

_OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}

FactorOf = Callable[[int], float]
"""The factor on the learning rate for the update of this number, from 0."""


def make_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of PyTorch that `config` names, for the parameters of `model` that are trained.

    Raises:
        ConfigError: an argument is unknown to it, or wrong.
    """
    make = _OPTIMIZERS[config.optimizer]
    known = [name for name in inspect.signature(make).parameters if name not in ("params", "lr")]
    given = dict(config.optimizer_params or {})
    if unknown := [name for name in given if name not in known]:
        nearest = difflib.get_close_matches(unknown[0], known, n=1)
        advice = f"; did you mean {nearest[0]}?" if nearest else f"; choose from: {', '.join(known)}"
        raise ConfigError(f"optimizer_configs.optimizer_params: {config.optimizer} has no {', '.join(unknown)}{advice}")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        return make(parameters, lr=config.learning_rate, **{name: _as_torch(value) for name, value in given.items()})
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"optimizer_configs.optimizer_params of {config.optimizer}: {error}") from error


def _as_torch(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def make_schedule(config: OptimizerConfig, *, d_model: int, total_steps: int) -> FactorOf:
    """The factor over the steps; that of `loss` is a `Plateau`'s and not among these."""
    schedule = config.scheduler_configs or ScheduleConfig()
    least = schedule.min_lr / config.learning_rate
    factor = _factor_of(config, schedule, d_model, total_steps, least)
    return lambda step: max(factor(step), least)


def _factor_of(config: OptimizerConfig, schedule: ScheduleConfig, d_model: int, total_steps: int, least: float) -> FactorOf:
    warmup_steps, decay_steps = schedule.warmup_steps, schedule.decay_steps
    if config.schedule_method == "noam":
        return partial(noam, d_model=schedule.d_model or d_model, warmup_steps=warmup_steps)
    if config.schedule_method == "isqrt":
        init_factor = schedule.init_lr / config.learning_rate
        return partial(warmup_isqrt, warmup_steps=warmup_steps, decay_steps=decay_steps, init_factor=init_factor)
    if config.schedule_method == "linear":
        return partial(linear_decay, decay_steps=decay_steps or total_steps, final_factor=least)
    if config.schedule_method == "cosine":
        return partial(warmup_cosine, warmup_steps=warmup_steps, total_steps=decay_steps or total_steps, final_factor=least)
    return lambda _: 1.0


def make_plateau(config: OptimizerConfig) -> Plateau | None:
    """What looks at validations, if the schedule is `loss`."""
    if config.schedule_method != "loss":
        return None
    schedule = config.scheduler_configs or ScheduleConfig()
    return Plateau(
        patience=schedule.patience, scale=schedule.scale, best=schedule.mode, final_factor=schedule.min_lr / config.learning_rate
    )
