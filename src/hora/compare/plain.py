"""Steps in the lines of plain PyTorch, which serve the trainers of the recipes in the place of `TrainStep`.

They take the recipe's own micro-batches, loss and optimizer; what differs is who sums gradients, when, and what they are divided by. Metrics are this
rank's alone. They tell the marks of a step (`hora.events`), so that `hora.report` says how long sums were waited for.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from hora import events
from hora.comm.session import session
from hora.diag.steps.variants import as_ddp
from hora.errors import HoraError
from hora.events import Mark
from hora.train.precision import autocast
from hora.train.step.compiling import Compile, compile_regions
from hora.train.step.forward import LossFunction
from hora.train.step.train_step import StepResult
from hora.train.step.tree import map_tensors, to_device


class PlainOptimizer:
    """What the trainers ask of an optimizer.

    Attributes:
        applied: the optimizer of PyTorch.
    """

    def __init__(self, applied: torch.optim.Optimizer) -> None:
        self.applied = applied
        self.param_groups = applied.param_groups

    def settle_checks(self) -> None:
        """Nothing is checked."""


class PlainStep(ABC):
    """Trains on one global batch a call.

    Args:
        model: as it is before anything is wrapped around it.
        loss_fn: as of `TrainStep`.
        optimizer: of the model.
        clip_norm: largest norm of the gradient, or None.
        precision: what autocast computes in.
        compile: as of `TrainStep`.

    Attributes:
        module: what `loss_fn` calls.
        states: as of `TrainStep`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        precision: str,
        compile: Compile,  # noqa: A002 (what torch calls it)
    ) -> None:
        if compile == "regions":
            compile_regions(model)
        elif compile:
            model.compile()
        self.module = model
        self.optimizer = PlainOptimizer(optimizer)
        self.states: list[Any] = []
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._loss_fn, self._clip_norm, self._precision = loss_fn, clip_norm, precision

    def __call__(self, step: Iterable[Any]) -> StepResult:
        """Trains on this rank's micro-batches; loss and metrics are this rank's. Collective where there are several ranks."""
        told = events.observer().on_mark
        told(Mark.WINDOW_BEGIN)
        self.optimizer.applied.zero_grad()
        micro_batches = [to_device(micro_batch, session().device) for micro_batch in step]
        totals, names, after = torch.zeros(2, dtype=torch.float64, device=session().device), tuple[str, ...](), []
        for place, micro_batch in enumerate(micro_batches):
            is_last = place + 1 == len(micro_batches)
            if is_last:
                told(Mark.LAST_BACKWARD)
            with self._around(is_last=is_last):
                state = self.states[place] if place < len(self.states) else None
                loss, weight, metrics, state = self._forward(micro_batch, state)
                self._backward(loss, weight, len(micro_batches))
            names = tuple(metrics)
            row = torch.stack([_number(value) for value in (loss, weight, *metrics.values())])
            totals = row if place == 0 else totals + row
            after.append(map_tensors(Tensor.detach, state))
        self.states = [*after, *self.states[len(after) :]]
        self._combine(totals[1], micro_batches)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._apply()
        told(Mark.UPDATE_END)
        result = StepResult(totals, names)
        if not micro_batches:
            result.metrics = defaultdict(lambda: totals.new_zeros(()))  # whatever they are called
        return result

    def _forward(self, micro_batch: Any, state: Any) -> Any:
        with autocast(session().device, self._precision):
            return self._loss_fn(self.module, micro_batch, state)

    def _around(self, *, is_last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """What forward and backward of a micro-batch run in."""
        return nullcontext()

    @abstractmethod
    def _backward(self, loss: Tensor, weight: float | Tensor, count: int) -> None:
        """Backward of one micro-batch of `count`."""

    @abstractmethod
    def _combine(self, weight: Tensor, micro_batches: Sequence[Any]) -> None:
        """Makes the gradients those of the update, and tells `BACKWARD_END` and `SUMS_END`. `weight` is this rank's."""

    def _apply(self) -> None:
        self.optimizer.applied.step()


class SumStep(PlainStep):
    """Sums of gradients, divided by the weight of the global batch: of one process, or over the ranks, parameter by parameter."""

    @override
    def _backward(self, loss: Tensor, weight: float | Tensor, count: int) -> None:
        loss.backward()

    @override
    def _combine(self, weight: Tensor, micro_batches: Sequence[Any]) -> None:
        told = events.observer().on_mark
        told(Mark.BACKWARD_END)
        if session().world_size > 1:
            for parameter in self._parameters:
                if parameter.grad is None:  # all ranks sum it, or none
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            dist.all_reduce(weight)
        told(Mark.SUMS_END)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= weight


class TwinStep(SumStep):
    """One process that has the rows of each micro-batch in the reverse order: the same sums, rounded otherwise."""

    @override
    def _forward(self, micro_batch: Any, state: Any) -> Any:
        return super()._forward(map_tensors(lambda rows: rows.flip(0), micro_batch), state)


class DataParallelStep(SumStep):
    """One process over several GPUs: the model is copied and the micro-batch cut anew in each step."""

    def __init__(self, model: nn.Module, *words: Any, num_gpus: int, **options: Any) -> None:
        super().__init__(model, *words, **options)
        self.module = nn.DataParallel(model, device_ids=list(range(num_gpus)))


class MeanStep(PlainStep):
    """The mean loss of each micro-batch, whose gradients a framework averages over the ranks, as their documentation shows.

    That is the gradient of the global batch's mean loss only where the counts are equal. A rank without a micro-batch takes its latest one, at no
    weight, since all must go through backward.
    """

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self._spare: Any = None
        self._last_gradient = _LastGradient(self._parameters)

    @override
    def _backward(self, loss: Tensor, weight: float | Tensor, count: int) -> None:
        weight = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        (loss / weight / count).backward()

    @override
    def _around(self, *, is_last: bool) -> AbstractContextManager[Any]:
        self._last_gradient.is_awaited = is_last
        return nullcontext()

    @override
    def _combine(self, weight: Tensor, micro_batches: Sequence[Any]) -> None:
        if micro_batches:
            self._spare = micro_batches[-1]
        elif self._spare is None:
            raise HoraError(f"rank {session().rank} has no micro-batch in the first step, so it has nothing to go through backward with")
        else:
            with self._around(is_last=True):
                loss, *_ = self._forward(self._spare, None)
                self._backward(0.0 * loss, 1, 1)
        self._settle()
        events.observer().on_mark(Mark.SUMS_END)

    def _settle(self) -> None:
        """Has all averages; those of DistributedDataParallel are there when backward returns."""
        self._last_gradient.settle()


class DdpStep(MeanStep):
    """DistributedDataParallel, which sums once a step."""

    def __init__(self, model: nn.Module, *words: Any, **options: Any) -> None:
        super().__init__(model, *words, **options)
        self.module = self._ddp = as_ddp(model, best=True)
        self._is_first = True

    @override
    def _around(self, *, is_last: bool) -> AbstractContextManager[Any]:
        super()._around(is_last=is_last)
        # With static_graph the first backward must be one that sums: it learns the graph.
        no_sync: AbstractContextManager[Any] = nullcontext() if is_last or self._is_first else self._ddp.no_sync()
        return no_sync

    @override
    def _settle(self) -> None:
        super()._settle()
        self._is_first = False


class HorovodStep(MeanStep):
    """Horovod's optimizer.

    Args:
        hvd: `horovod.torch`, whose ranks are those of the session.
    """

    def __init__(self, model: nn.Module, *words: Any, hvd: Any, **options: Any) -> None:
        super().__init__(model, *words, **options)
        self._hvd = hvd.DistributedOptimizer(self.optimizer.applied, named_parameters=model.named_parameters())
        self.optimizer = PlainOptimizer(self._hvd)
        self._passes = 1

    @override
    def _backward(self, loss: Tensor, weight: float | Tensor, count: int) -> None:
        if count != self._passes:
            self._passes = count
            self._hvd.set_backward_passes_per_step(count)
        super()._backward(loss, weight, count)

    @override
    def _settle(self) -> None:
        super()._settle()
        self._hvd.synchronize()

    @override
    def _apply(self) -> None:
        with self._hvd.skip_synchronize():
            self._hvd.step()


class _LastGradient:
    """Tells `BACKWARD_END` when the gradient that comes last is there, after which a framework inside backward only waits for sums.

    Which one that is shows in the first backward, with a hook for each parameter; afterwards there is one hook.

    Attributes:
        is_awaited: whether the backward to come is the last one of a step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.is_awaited = False
        self._is_told = False
        self._latest: nn.Parameter | None = None
        self._handles: list[RemovableHandle] = [parameter.register_post_accumulate_grad_hook(self._note) for parameter in parameters]

    def settle(self) -> None:
        """Backward has returned."""
        if not self._is_told:
            events.observer().on_mark(Mark.BACKWARD_END)
        self._is_told = False
        if self._latest is not None:
            for handle in self._handles:
                handle.remove()
            self._handles = [self._latest.register_post_accumulate_grad_hook(self._tell)]
            self._latest = None

    def _note(self, parameter: nn.Parameter) -> None:
        self._latest = parameter

    def _tell(self, _: nn.Parameter) -> None:
        if self.is_awaited and not self._is_told:
            self._is_told = True
            events.observer().on_mark(Mark.BACKWARD_END)


def _number(value: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64).reshape(())
    return torch.full((), value, dtype=torch.float64, device=session().device)


PlainMaker = Callable[..., PlainStep]
"""The class of a step, with what it needs besides."""
