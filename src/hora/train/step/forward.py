"""What a step is made of, eager or captured: forward and backward of each micro-batch, and the sums over all ranks of loss, weight and metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from hora.comm.flat import all_reduce_flat
from hora.comm.objects import all_gather_object
from hora.comm.peer_memory import Divisor
from hora.comm.session import session
from hora.comm.work import Work
from hora.errors import ConfigError
from hora.sync.beside import Beside
from hora.sync.control import LEAST_WEIGHT, is_suspicious
from hora.sync.given import require_weight
from hora.sync.loss_scale import LossScale
from hora.sync.optimizer import DistributedOptimizer
from hora.train.precision import autocast
from hora.train.step.tree import map_tensors

LossFunction = Callable[[Any, Any, Any], tuple[Tensor, float | Tensor, Mapping[str, Tensor | float], Any]]
"""`loss_fn(model, micro_batch, state)` gives the summed loss, its weight, sums by name, and the state for the next step."""


@dataclass
class Forward:
    """How a micro-batch is computed.

    Attributes:
        model: what `loss_fn` is given.
        loss_fn: the user's.
        optimizer: drives the windows.
        precision: one of `PRECISIONS`.
        loss_scale: of float16.
        names: of the metrics, once this rank or another has had a micro-batch.
        agreed: whether all ranks have them.
    """

    model: nn.Module
    loss_fn: LossFunction
    optimizer: DistributedOptimizer
    precision: str
    loss_scale: LossScale | None = None
    names: tuple[str, ...] | None = None
    agreed: bool = False

    def lasting_tensors(self) -> list[Tensor]:
        """What a step works on, and which must stay where it is while a graph does: parameters, buffers, the state of the optimizer."""
        state = [value for values in self.optimizer.applied.state.values() for value in values.values() if isinstance(value, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def autocast(self) -> AbstractContextManager[Any]:
        """What `loss_fn` runs in."""
        return autocast(session().device, self.precision)

    def run(self, micro_batches: Iterable[Any], states: Sequence[Any], sums: "StepSums", num_early: int | None = None) -> list[Any]:
        """Forward and backward of all micro-batches as one window, with `states` by micro-batch; returns the new ones.

        Collective. `num_early`: the sums over the ranks begin before the backward of the micro-batch of that number.
        """
        after: list[Any] = []
        with self.optimizer.synchronizer.scaled(self.loss_scale):
            for index, micro_batch in enumerate(self.optimizer.micro_batches(micro_batches)):
                with self.autocast():
                    state = states[index] if index < len(states) else None
                    loss, weight, metrics, state = _checked(self.loss_fn(self.model, micro_batch, state))
                sums.add(loss, weight, metrics)
                if index + 1 == num_early:
                    sums.send()
                    sums.find_total_weight()
                self.optimizer.backward(loss, weight=weight)
                after.append(map_tensors(Tensor.detach, state))
        return after


class StepSums:
    """Loss, weight and metrics of one step, summed over micro-batches, then over the ranks.

    In exact mode each logical rank has a row of its own, and these are added in the order of the tree.

    Args:
        forward: knows the names of the metrics, or learns them.
        logical_ranks: to whom the micro-batches belong; needed in exact mode.
        beside: on a GPU, where all this is done, beside forward and backward; by default in their order.
    """

    def __init__(self, forward: Forward, logical_ranks: Sequence[int] = (), beside: Beside | None = None) -> None:
        here = session()
        self._beside = beside or Beside(None)
        self.own_weight: float | Tensor = 0.0
        self._forward = forward
        self._logical = here.logical_ranks if here.exact else None
        self._of = logical_ranks
        self._rows: dict[int, Tensor] = {}
        self._num_added = 0
        self._sent: tuple[Tensor, Work] | None = None
        self._total_weight: tuple[Tensor, Tensor] | None = None
        self._known: torch.cuda.Event | None = None
        self._device = here.device

    @torch.no_grad()
    def add(self, loss: Tensor, weight: float | Tensor, metrics: Mapping[str, Tensor | float]) -> None:
        """Adds a micro-batch.

        Raises:
            ConfigError: it has other metrics than those before.
        """
        if self._forward.names is None:
            self._forward.names = tuple(metrics)
        if metrics.keys() != set(self._forward.names):
            raise ConfigError(
                f"loss_fn must return the same metrics for each micro-batch, but returned {list(metrics)} after {list(self._forward.names)}"
            )
        values = [loss, weight, *(metrics[name] for name in self._forward.names)]
        row = 0 if self._logical is None else self._of[self._num_added]
        with self._beside.running(values):
            added = torch.stack([self._on_device(value) for value in values])
            self._rows[row] = self._rows[row] + added if row in self._rows else added
        self.own_weight = self.own_weight + (weight.detach() if isinstance(weight, Tensor) else weight)
        self._num_added += 1

    def _on_device(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self._device, torch.float64).reshape(())
        # Not a tensor of the CPU's that is copied: that cannot be captured.
        return torch.full((), value, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def send(self) -> None:
        """Begins the sum over the ranks, which have agreed on the names of the metrics. Collective."""
        rows = 1 if self._logical is None else self._logical.count
        with self._beside.running(()):
            zero = torch.zeros(2 + len(self._forward.names or ()), dtype=torch.float64, device=self._device)
            table = torch.stack([self._rows.get(row, zero) for row in range(rows)])
            self._sent = table, all_reduce_flat(table.view(-1))

    @torch.no_grad()
    def find_total_weight(self) -> None:
        """Begins to make what `total_weight` returns, after `send`, while backward goes on: behind it nothing else would run meanwhile."""
        with self._beside.running(()):
            loss, weight = self._arrived()[:2]
            bad = is_suspicious(weight)
            self._total_weight = weight.masked_fill(bad, LEAST_WEIGHT), bad & ((loss != 0) | (weight != 0))
            self._known = torch.cuda.current_stream().record_event()  # only what is captured is found early

    def total_weight(self) -> tuple[Tensor, Tensor]:
        """The weight of the global batch, next to nothing where it is zero; and whether the loss must not be divided by it."""
        assert self._total_weight is not None
        self._beside.join()
        return self._total_weight

    def soon(self) -> Divisor:
        """The total weight, for a stream that waits for it while this step computes."""
        assert self._total_weight is not None
        assert self._known is not None
        return Divisor(self._total_weight[0], self._known)

    @torch.no_grad()
    def total(self) -> Tensor:
        """Loss, weight and metrics over all ranks, `[2 + metrics]` in float64 on the device, after `send`."""
        with self._beside.running(()):
            total = self._arrived()
        self._beside.join()
        return total

    def _arrived(self) -> Tensor:
        assert self._sent is not None
        table, work = self._sent
        work.wait()
        if self._logical is None:
            return table[0]
        rows: list[tuple[range, Tensor]] = [(range(row, row + 1), values) for row, values in enumerate(table)]
        return self._logical.total(rows, torch.add)


def agree_on_names(forward: Forward) -> None:
    """Gives all ranks the names of the metrics, as soon as one has them. Collective.

    Raises:
        ConfigError: ranks have different ones.
    """
    told = [tuple(names) for names in all_gather_object(None if forward.names is None else list(forward.names)) if names is not None]
    if len(different := dict.fromkeys(told)) > 1:
        raise ConfigError(
            f"loss_fn must return the same metrics on all ranks, but returned {' and '.join(str(list(names)) for names in different)}"
        )
    if told:
        forward.names, forward.agreed = told[0], True


def _checked(returned: Any) -> tuple[Tensor, float | Tensor, Mapping[str, Tensor | float], Any]:
    if not (isinstance(returned, tuple) and len(returned) == 4 and isinstance(returned[0], Tensor) and isinstance(returned[2], Mapping)):
        raise ConfigError(
            "loss_fn must return (loss_sum, weight, metrics, state): the summed loss as a tensor, how many samples or tokens that is, a dict of "
            f"sums, and what the next step is to be given, or None; but it returned {type(returned).__name__}"
            + (f" of {len(returned)}" if isinstance(returned, tuple) else "")
        )
    loss, weight, metrics, state = returned
    if loss.numel() != 1 or not loss.is_floating_point() or not loss.requires_grad:
        raise ConfigError(
            f"the loss of loss_fn must be a scalar in floating point that depends on the parameters, but has shape {list(loss.shape)} and type "
            f"{loss.dtype}{'' if loss.requires_grad else ', and needs no gradient'}"
        )
    require_weight(weight)
    for name, value in metrics.items():
        if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())):
            raise ConfigError(f"the metrics of loss_fn must be numbers or tensors of one, but {name!r} is {_say(value)}")
    return loss, weight, metrics, state


def _say(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)} and type {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
