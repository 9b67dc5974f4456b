"""Is the gradient of the global batch finite? Asked of the sums, which are the same on every rank, so that all decide alike without a message.

On a CPU the answer is there at once. On a GPU it stays on the device: an optimizer that torch can switch off there (`fused=True`) is, in that very
step, and the hosts read the answer one step later; for others the host waits for it. Who spoilt the gradient, where and in which micro-step is
kept beside, on the device, and read only when something is wrong.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hora import log
from hora.comm.objects import all_gather_object
from hora.comm.torch_private import non_finite_check, norms_of_many
from hora.errors import NonFiniteGradient
from hora.sync.checks import NonFinitePolicy
from hora.sync.fused import switched_off_if, switches_off_on_device
from hora.sync.gradients import GradientBucket

_SHOWN = 3


Marks = dict[int, Tensor]
"""A number for the gradient of each parameter by its index, finite only if the gradient is. They are read only when something is wrong."""


class _Reading:
    """A flag of the device on its way to the host."""

    def __init__(self) -> None:
        self._host = torch.empty((), pin_memory=True)
        self._arrived = torch.cuda.Event()

    def take(self, flag: Tensor) -> None:
        """Begins to copy it."""
        self._host.copy_(flag, non_blocking=True)
        self._arrived.record()

    def value(self) -> bool:
        """Waits until it has come."""
        self._arrived.synchronize()
        return bool(self._host)


@dataclass
class _Verdict:
    """What is known of the gradient of one update.

    Attributes:
        step: the update.
        bad: 1 where it is not finite, else 0; on the device.
        reading: its way to the host; None on a CPU.
        marks: of this rank's own gradients after each micro-step.
        losses: of the micro-steps.
    """

    step: int
    bad: Tensor
    reading: _Reading | None
    marks: list[Marks]
    losses: list[Tensor]

    def is_bad(self) -> bool:
        """Waits for the device if need be."""
        return bool(self.bad) if self.reading is None else self.reading.value()


class FiniteGradients:
    """Watches the gradients of one model.

    Args:
        names: of the parameters.
        parameters: those that get gradients.
        buckets: in which the sums come to stand.
        sparse: those of `parameters` that get sparse gradients.
        policy: what happens to an update that is not finite.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[GradientBucket],
        sparse: Sequence[nn.Parameter],
        policy: NonFinitePolicy,
    ):
        self._names = list(names)
        self._parameters = list(parameters)
        self._buckets = buckets
        self._sparse = list(sparse)
        self._policy = policy
        self._on_gpu = self._parameters[0].device.type == "cuda"
        self._marks: list[Marks] = []
        self._losses: list[Tensor] = []
        self._readings = [_Reading(), _Reading()] if self._on_gpu else []
        self._verdict: _Verdict | None = None
        self._pending: _Verdict | None = None
        self._settled: _Verdict | None = None
        self.num_skipped = 0

    def begin(self) -> None:
        """A window begins."""
        self._marks, self._losses = [], []

    @torch.no_grad()
    def note(self, losses: Sequence[Tensor], *, last: bool) -> None:
        """A micro-step is done. Its gradients are marked now, those of the last one by `keep_own` or `look`."""
        if self._policy != "ignore":
            self._losses.append(losses[0].detach() if len(losses) == 1 else torch.stack([loss.detach().float() for loss in losses]))
            if not last:
                self._mark()

    @torch.no_grad()
    def keep_own(self) -> None:
        """The window is complete and `.grad` are this rank's own: they are marked now if `look` comes too late for that."""
        if self._policy != "ignore" and self._marks_before_sums:
            self._mark()

    @torch.no_grad()
    def look(self, step: int) -> None:
        """The buckets and sparse gradients hold the sums; other `.grad` are still this rank's own."""
        if self._policy == "ignore":
            return
        sums = [bucket.gradients for bucket in self._buckets]
        sums += [p.grad.coalesce().values() for p in self._sparse if p.grad is not None]
        bad = _flag([values for values in sums if values.numel() > 0], self._parameters[0].device)
        reading = None
        if self._on_gpu:
            reading = self._readings[0 if self._pending is None or self._pending.reading is not self._readings[0] else 1]
            reading.take(bad)
        elif bool(bad) and not self._marks_before_sums:
            self._mark()
        self._verdict = _Verdict(step, bad, reading, self._marks, self._losses)

    @property
    def _marks_before_sums(self) -> bool:
        """On a GPU nobody knows in time whether they will be needed; sums take the place of sparse gradients."""
        return self._on_gpu or bool(self._sparse)

    def _mark(self) -> None:
        self._marks.append(_marks([parameter.grad for parameter in self._parameters]))

    @contextmanager
    def update(self, optimizer: torch.optim.Optimizer) -> Iterator[bool]:
        """Around the update by `optimizer`, which is to be made inside if True is given; what is not finite does not get through.

        An update that the device has left out is reported here, at the next one. Collective if there is something to report.

        Raises:
            NonFiniteGradient: the gradient is not finite, and the policy says so; on every rank alike.
        """
        verdict, earlier = self._verdict, self._pending
        if earlier is not None and earlier is not verdict:
            self._pending = None
            self._settle(earlier)
        if verdict is None:
            yield True
        elif verdict.reading is not None and switches_off_on_device(optimizer):
            self._pending = verdict
            with switched_off_if(optimizer, verdict.bad):
                yield True
        else:
            self._settle(verdict)
            yield not verdict.is_bad()

    def _settle(self, verdict: _Verdict) -> None:
        if verdict is self._settled or not verdict.is_bad():
            return
        self._settled = verdict
        self.num_skipped += 1
        text = _explain(verdict.step, all_gather_object(self._report(verdict)))
        if self._policy == "raise":
            raise NonFiniteGradient(f'{text} Look at that batch, lower the learning rate, or go on without such updates: non_finite="skip"')
        if self._policy == "warn":
            log.get_logger().warning("%s", text)

    def _report(self, verdict: _Verdict) -> dict[str, Any]:
        """What this rank's own gradients and losses were like."""
        finite_losses = [bool(loss.isfinite().all()) for loss in verdict.losses]
        for micro_step, marks in enumerate(verdict.marks):
            spoilt = [index for index, mark in marks.items() if not math.isfinite(float(mark))]
            if spoilt:
                loss_is_finite = finite_losses[micro_step] if micro_step < len(finite_losses) else True
                names = [self._names[index] for index in spoilt]
                return {"micro_step": micro_step, "names": names, "loss_is_finite": loss_is_finite, "explicit": bool(verdict.losses)}
        return {"micro_step": None}


def _flag(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 where an element of any is not finite, else 0: a float32 scalar on the device."""
    flag = torch.zeros((), device=device)
    if device.type == "cpu":
        # A sum is ten times as fast as looking at each element, which need be done only if it is not finite (or too large).
        suspects = [values for values in sums if not bool(_sum(values).isfinite())]
        return flag + any(not bool(values.isfinite().all()) for values in suspects)
    if non_finite_check is None:
        norms = [torch.linalg.vector_norm(values, math.inf).isfinite() for values in sums]
        return flag + ~torch.stack(norms).all() if norms else flag
    one = _one(device)
    for dtype in {values.dtype for values in sums}:
        non_finite_check([values for values in sums if values.dtype is dtype], flag, one)
    return flag


@lru_cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _marks(gradients: Sequence[Tensor | None]) -> Marks:
    values = {index: _values(gradient) for index, gradient in enumerate(gradients) if gradient is not None and gradient.numel() > 0}
    tensors = list(values.values())
    if norms_of_many is None or not tensors or tensors[0].device.type == "cpu":
        return dict(zip(values, map(_sum, tensors), strict=True))
    return dict(zip(values, norms_of_many(tensors, math.inf), strict=True))


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None)


def _explain(step: int, reports: Sequence[dict[str, Any]]) -> str:
    clauses = []
    for rank, report in enumerate(reports):
        if report["micro_step"] is not None:
            loss = "" if report["loss_is_finite"] else ", whose loss was not finite either"
            micro_step = f"first at micro-step {report['micro_step']}{loss}, " if report["explicit"] else ""
            clauses.append(f"on rank {rank} {micro_step}in {_say(report['names'])}")
    where = "; ".join(clauses) or "though each rank's own gradients were: their sum is too large for its type"
    return f"all gradients must be finite, but those of update {step} were not, {where}. No rank applied it."


def _say(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(repr(name) for name in names[:_SHOWN]) + (f" and {more} more parameters" if more > 0 else "")
