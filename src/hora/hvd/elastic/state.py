"""The state of a script that trains with PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from hora.hvd.basics import rank
from hora.hvd.elastic.handlers import (
    LRSchedulerStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
    get_handler_registry,
    handler_for,
    set_handler_registry,
)
from hora.hvd.elastic.object_state import ObjectState
from hora.hvd.elastic.sampler import ElasticSampler
from hora.hvd.functions import broadcast_object

__all__ = [
    "LRSchedulerStateHandler",
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class TorchState(ObjectState):
    """A state of modules, optimizers, schedules, samplers and plain objects, which are its attributes.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        **kwargs: more of them, by the names of the attributes.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: handler for name, value in given.items() if (handler := handler_for(value)) is not None}
        self.__dict__["_handlers"] = handlers
        self.__dict__.update({name: handler.value for name, handler in handlers.items()})
        super().__init__(broadcast_object, rank, **{name: value for name, value in given.items() if name not in handlers})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    @override
    def save(self) -> None:
        self._each(lambda handler: handler.save())
        super().save()

    @override
    def restore(self) -> None:
        self._each(lambda handler: handler.restore())
        super().restore()

    @override
    def sync(self) -> None:
        self._each(lambda handler: handler.sync())
        super().sync()

    @override
    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def _each(self, act: Callable[[StateHandler], None]) -> None:
        for handler in self._handlers.values():
            act(handler)

    @override
    def _is_kept(self) -> bool:
        return all(isinstance(handler, StateDictHandler) for handler in self._handlers.values())

    @override
    def _to_tree(self) -> Any:
        kept = {name: handler.saved for name, handler in self._handlers.items() if isinstance(handler, StateDictHandler)}
        return {**super()._to_tree(), "handled": kept}

    @override
    def _load(self, tree: Any) -> None:
        super()._load(tree)
        for name, handler in self._handlers.items():
            assert isinstance(handler, StateDictHandler)
            handler.saved = tree["handled"][name]
