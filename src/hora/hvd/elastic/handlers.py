"""How `TorchState` saves, restores and synchronises what is no plain object: modules, optimizers, schedules, samplers."""

import copy
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from typing_extensions import override

from hora.hvd.elastic.sampler import ElasticSampler
from hora.hvd.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Takes care of one value; scripts derive their own from it (`set_handler_registry`)."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps the value's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank the value's state of rank 0. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Takes care of another value from now on, as it is."""
        self.value = value
        self.save()


@runtime_checkable
class HasStateDict(Protocol):
    """What can say and be told where it stands: a GradScaler, say."""

    def state_dict(self) -> Any:
        """Where it stands."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Stands there."""


class StateDictHandler(StateHandler):
    """Of what has a `state_dict` that can be sent.

    Attributes:
        saved: what was saved last.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    @override
    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    @override
    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))  # an optimizer keeps the tensors that it is given

    @override
    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


class ModelStateHandler(StateDictHandler):
    """Of a module."""

    @override
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateDictHandler):
    """Of an optimizer."""

    @override
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class LRSchedulerStateHandler(StateDictHandler):
    """Of a schedule of learning rates."""


class SamplerStateHandler(StateDictHandler):
    """Of an `ElasticSampler`: how much of the epoch is processed is the same on all ranks."""


Registry = Sequence[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (HasStateDict, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Which handler takes care of what: the first whose type fits."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Has another registry in force, for states that are made from now on."""
    global _registry
    _registry = registry


def handler_for(value: Any) -> StateHandler | None:
    """The handler of a value; None: it is a plain object."""
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
