"""`DistributedOptimizer(op=Adasum)`: every rank makes its own update, and the updates are combined."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from hora.hvd import state
from hora.hvd.asynchronous import Adasum, allreduce_async_
from hora.hvd.handles import synchronize


class AdasumSteps(torch.optim.Optimizer):
    """The steps of such an optimizer; comes before the class that makes the updates."""

    def synchronize(self) -> None:
        """Does nothing: updates are combined, in `step`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Refused.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters, and combines the updates over the ranks. Collective: by the names of the parameters."""
        here: Any = self
        combining = here._settings.combining
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        here._should_synchronize = False
        try:
            result = super().step(closure)
        finally:
            here._should_synchronize = True
        if state.is_running() and combining.process_set.size() > 1 and combining.process_set.included():
            self._combine_updates(trained, before, here._settings.labels, combining)
        return result

    step.hooked = True  # type: ignore[attr-defined]  # as in `optimizer`

    @torch.no_grad()
    def _combine_updates(self, trained: Any, before: Any, labels: Any, combining: Any) -> None:
        sent = []
        for parameter, old, label in zip(trained, before, labels, strict=True):
            small, ctx = combining.compression.compress((parameter - old).contiguous())
            handle = allreduce_async_(small, name=label, op=Adasum, process_set=combining.process_set)
            sent.append((handle, ctx))
        for parameter, old, (handle, ctx) in zip(trained, before, sent, strict=True):
            parameter.copy_(old + combining.compression.decompress(synchronize(handle), ctx))
