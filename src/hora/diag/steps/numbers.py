"""Does a variant do the work? Its updates, after all the timing, beside those of the gradients of all ranks, added up one after the other.

Parameters and the optimizer's state are put back in place to where they began, so that graphs go on with the memory that they have captured, and two
more steps are made. An update that leaves out a rank, or that nobody makes, is far from the expected one; rounding is not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import hora
from hora.comm.dealt_out import as_dtensor
from hora.diag.steps.request import how_compiled, is_alone
from hora.diag.steps.variants import Variant, model_of
from hora.diag.steps.workloads import Job
from hora.train.step.compiling import Compile, compiled

NUM_STEPS = 2


def tolerance(job: Job) -> float:
    """The largest difference that is taken for rounding.

    Who leaves out the other ranks is 0.8 to 1.4 off, and who makes no update 1. Under bfloat16 much of the gradients of a new model is rounding
    (up to 0.34 was seen, from another order of memory alone), of which Adam makes whole steps.
    """
    return 0.5 if job.bfloat16 else 0.1


class Expected:
    """What parameters are before and after the steps, made without a sum of the backend's: each rank tells its gradients, and all add them up.

    A new ResNet in bfloat16 is so sensitive to rounding that nothing would be left to compare (0.6 was seen) if one rank computed what others do,
    whose compiler may have chosen other kernels, or if what is compiled were compared with what is not.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = _values(model_of(job))
        self._made: dict[tuple[bool, Compile], list[Tensor]] = {}

    def _after(self, *, alone: bool, how: Compile) -> list[Tensor]:
        if (alone, how) not in self._made:
            self._made[alone, how] = _train(self._job, how, alone=alone)
        return self._made[alone, how]

    def difference(self, name: str, variant: Variant) -> float:
        """How far its updates are from the expected ones, over the length of these; the largest of all ranks. Collective."""
        _rewind(variant, self._before)
        for _ in range(NUM_STEPS):
            variant.step()
        found, wanted = _values(variant.model), self._after(alone=is_alone(name), how=how_compiled(name))
        off = _distance(found, wanted) / _distance(wanted, self._before)
        return float(max(hora.all_gather_object(off)))


def _train(job: Job, how: Compile, *, alone: bool) -> list[Tensor]:
    """Parameters after the steps, of the batch of this rank or of those of all. Collective."""
    model = model_of(job)
    module = compiled(model, how)
    optimizer = job.optimizer(model.parameters())
    batch = job.batch_of(hora.rank(), hora.device())
    weight = job.weight(batch)
    total = weight if alone else sum(hora.all_gather_object(weight))
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        (job.loss_sum(module, batch) / total).backward()
        if not alone:
            for parameter in model.parameters():
                _add_up(parameter)
        optimizer.step()
    return _values(model)


def _add_up(parameter: nn.Parameter) -> None:
    """Its gradient becomes the sum of those of all ranks, in the order of ranks. Collective."""
    if parameter.grad is not None:
        first, *others = hora.all_gather(parameter.grad.reshape(-1), same_shape=True)
        parameter.grad = sum(others, start=first).view_as(parameter)


@torch.no_grad()
def _rewind(variant: Variant, before: Sequence[Tensor]) -> None:
    for parameter, value in zip(variant.model.parameters(), before, strict=True):
        _put(parameter, value.to(hora.device()))
    for values in variant.optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor):
                value.zero_()


def _put(parameter: nn.Parameter, value: Tensor) -> None:
    part = as_dtensor(parameter)
    if part is None:
        parameter.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    part.copy_(distribute_tensor(value, part.device_mesh, part.placements))


@torch.no_grad()
def _values(model: nn.Module) -> list[Tensor]:
    """Whole and on the CPU: they must not take the memory of what is measured."""
    parts = [(parameter, as_dtensor(parameter)) for parameter in model.parameters()]
    return [(parameter if part is None else part.full_tensor()).detach().cpu().clone() for parameter, part in parts]


def _distance(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
    squares = [(left.double() - right.double()).square().sum() for left, right in zip(these, those, strict=True)]
    return torch.stack(squares).sum().sqrt().item()
