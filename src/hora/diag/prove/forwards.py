"""Sees the calls of a script's models from outside: what goes in, and whether random numbers were drawn."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hora.diag.prove.ablation import Ablation
from hora.diag.prove.records import Rows
from hora.diag.prove.rows import rows_of

Inputs = tuple[Rows, ...]


class Forwards:
    """The calls since they were last taken. Only modules that have parameters count, and only when no other such module is calling them.

    Attributes:
        training: inputs of each call that trains.
        evaluation: inputs of each other call.
        random_moved: whether a training call has drawn from torch's global generators.
    """

    def __init__(self, ablation: Ablation, on_call: Callable[[nn.Module, bool], None], recomputing: Callable[[], bool]):
        self.training: list[Inputs] = []
        self.evaluation: list[Inputs] = []
        self.random_moved = False
        self._ablation = ablation
        self._on_call = on_call
        self._recomputing = recomputing
        self._inside = threading.local()

    def install(self) -> None:
        """Wraps the call of modules."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(self._inside, "model", False) or not self._is_root(module):
                return original(module, *args, **kwargs)
            self._inside.model = True
            try:
                return self._watch(original, module, args, kwargs)
            finally:
                self._inside.model = False

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def take(self) -> tuple[tuple[Inputs, ...], tuple[Inputs, ...], bool]:
        """What was seen since the last time: training, evaluation, whether random numbers were drawn."""
        taken = tuple(self.training), tuple(self.evaluation), self.random_moved
        self.training, self.evaluation, self.random_moved = [], [], False
        return taken

    def _is_root(self, module: nn.Module) -> bool:
        return not self._recomputing() and next(module.parameters(), None) is not None

    def _watch(self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trains = torch.is_grad_enabled() and module.training
        self._on_call(module, trains)
        (self.training if trains else self.evaluation).append(rows_of(args, kwargs))
        self._ablation.prepare(module)
        args, kwargs = self._ablation.cast(args), self._ablation.cast(kwargs)
        before = _random_states() if trains else []
        result = original(module, *args, **kwargs)
        if trains and not all(torch.equal(a, b) for a, b in zip(before, _random_states(), strict=False)):
            self.random_moved = True
        return result


def _random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
