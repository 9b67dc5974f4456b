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
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hora import events, log
from hora.comm.flat import all_reduce_flat
from hora.comm.objects import all_gather_object
from hora.comm.torch_private import non_finite_check, norms_of_many
from hora.errors import NonFiniteGradient
from hora.sync.checks import NonFinitePolicy
from hora.sync.fused import switched_off_if
from hora.sync.gradients import GradientBucket, extremes
from hora.sync.loss_scale import LossScale

_SHOWN = 3

_CHECKED_DTYPES = (torch.float16, torch.float32, torch.float64)
"""Those that `non_finite_check` takes."""

Marks = dict[int, Tensor]
"""For each parameter with a gradient, by its index, what is finite only if the gradient is: a norm, or the gradient itself. Looked at only when
something is wrong."""

_KEPT_BYTES = 128 * 2**20
"""Gradients up to this size in all are kept as they are until the next update, which costs a small model less than their norms, and a large one too
much memory: they are twice there then."""


class _Flag:
    """1 once something was not finite, else 0: a float32 scalar on the device, and on its way to the host."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.zeros((), device=device)
        self._host = self.on_device if device.type == "cpu" else torch.empty((), pin_memory=True, device="cpu")
        self._arrived = None if device.type == "cpu" else torch.cuda.Event()
        self.is_down = True  # as far as the host knows

    def send(self) -> None:
        """Begins to copy it to the host."""
        self.is_down = False
        if self._arrived is not None:
            self._host.copy_(self.on_device, non_blocking=True)
            self._arrived.record()

    def is_up(self) -> bool:
        """Waits for the device if need be."""
        if self._arrived is not None and not self._arrived.query():
            events.observer().on_mark(events.Mark.DEVICE_BEGIN)
            self._arrived.synchronize()
            events.observer().on_mark(events.Mark.DEVICE_END)
        self.is_down = not bool(self._host)
        return not self.is_down


class CapturedLook(Protocol):
    """What looks at the gradients of updates that are replayed from CUDA graphs (`sync.captured`)."""

    num_skipped: int

    def settle(self) -> None:
        """Waits for them, and reports."""


@dataclass
class _Verdict:
    """What is known of the gradient of one update.

    Attributes:
        step: the update.
        bad: whether it is not finite.
        marks: of this rank's own gradients after each micro-step.
        losses: of the micro-steps.
        loss_scale: what the losses were multiplied with.
        bad_weight: whether the gradient was to be divided by a weight that is none.
    """

    step: int
    bad: _Flag
    marks: list[Marks]
    losses: list[Tensor]
    loss_scale: LossScale | None
    bad_weight: bool | Tensor


class FiniteGradients:
    """Watches the gradients of one model.

    Args:
        names: of the parameters.
        parameters: those that get gradients.
        buckets: in which the sums come to stand.
        sparse: those of `parameters` that get sparse gradients.
        policy: what happens to an update that is not finite.
        in_parts: whether each rank has a part of the sums, so that what one has seen is told to all.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[GradientBucket],
        sparse: Sequence[nn.Parameter],
        policy: NonFinitePolicy,
        *,
        in_parts: bool = False,
    ):
        self._in_parts = in_parts
        self._names = list(names)
        self._parameters = list(parameters)
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._buckets = buckets
        for bucket in buckets:
            bucket.keeps_marks = policy != "ignore"
        self._sparse = list(sparse)
        self._policy = policy
        self._device = self._parameters[0].device
        self._keeps = sum(parameter.nbytes for parameter in self._parameters) <= _KEPT_BYTES
        self._marks: list[Marks] = []
        self._losses: list[Tensor] = []
        self._flags = [_Flag(self._device), _Flag(self._device)]
        self._verdict: _Verdict | None = None
        self._pending: _Verdict | None = None
        self._settled: _Verdict | None = None
        self._num_skipped = 0
        self.captured: CapturedLook | None = None

    def begin(self) -> None:
        """A window begins."""
        self._marks, self._losses = [], []
        for bucket in self._buckets:
            bucket.own_marks = {}

    def note(self, losses: Sequence[Tensor], *, last: bool) -> None:
        """A micro-step is done. Its gradients are marked now, those of the last one by `keep_own` or `look`."""
        if self._policy != "ignore":
            self._losses.append(losses[0].detach() if len(losses) == 1 else torch.stack([loss.detach().float() for loss in losses]))
            if not last:
                with torch.no_grad():
                    self._marks.append(norms(self._own()))

    def keep_own(self) -> None:
        """The window is complete and `.grad` are this rank's own: they are marked now if `look` comes too late for that. Under `torch.no_grad()`."""
        if self._policy == "ignore" or not self._marks_before_sums:
            return
        # Those of a plain backward may lie where the sums come to stand.
        self._marks.append(self._own() if self._keeps and self._losses else norms(self._own()))

    def look(self, step: int, bad_weight: bool | Tensor = False, loss_scale: LossScale | None = None) -> Tensor | None:
        """The buckets and sparse gradients hold the sums; other `.grad` are still this rank's own. Under `torch.no_grad()`.

        `bad_weight`: what they are to be divided by is not positive, or not finite, which is right only for a batch without gradient.

        Returns:
            A scalar that is 1 if something is not finite, else 0; None if nobody looks.
        """
        if self._policy == "ignore":
            return None
        sparse = [p.grad.coalesce().values() for p in self._sparse if p.grad is not None]
        uncertain = [bucket.sums for bucket in self._buckets if not bucket.is_surely_finite()]
        flag = self._free_flag()
        raise_flag(flag.on_device, [values for values in (*uncertain, *sparse) if values.numel() > 0])
        if bad_weight is not False:
            raise_for_weight(flag.on_device, [*(bucket.sums for bucket in self._buckets), *sparse], bad_weight)
        if self._in_parts and (uncertain or bad_weight is not False):
            raise_everywhere(flag.on_device)
        flag.send()
        if not self._marks_before_sums and flag.is_up():
            self._marks.append(self._own())
        self._verdict = _Verdict(step, flag, self._marks, self._losses, loss_scale, bad_weight)
        return flag.on_device

    @property
    def _marks_before_sums(self) -> bool:
        """On a GPU nobody knows in time whether they will be needed; sums take the place of sparse gradients."""
        return self._device.type == "cuda" or bool(self._sparse)

    def _own(self) -> Marks:
        """This rank's own gradients; marks of those that have given way to sums."""
        own = {index: parameter.grad for index, parameter in enumerate(self._parameters) if parameter.grad is not None}
        for bucket in self._buckets:
            own.update({self._index[id(bucket.parameters[member])]: found for member, found in bucket.own_marks.items()})
        return dict(sorted(own.items()))

    def _free_flag(self) -> _Flag:
        """One that is down, and at which nobody will look any more."""
        place = 1 if self._pending is not None and self._pending.bad is self._flags[0] else 0
        if not self._flags[place].is_down:
            self._flags[place] = _Flag(self._device)
        return self._flags[place]

    @contextmanager
    def update(self, optimizer: torch.optim.Optimizer, *, on_device: bool) -> Iterator[bool]:
        """Around the update by `optimizer`, which is to be made inside if True is given; what is not finite does not get through.

        An update that the device has left out is reported here, at the next one. Collective if there is something to report.

        Args:
            optimizer: makes the update.
            on_device: whether a GPU can leave the update out by itself; the same on every rank.

        Raises:
            NonFiniteGradient: the gradient is not finite, and the policy says so; on every rank alike.
        """
        verdict = self._verdict
        if self._pending is not verdict:
            self.settle()
        if verdict is None:
            yield True
        elif self._device.type == "cuda" and on_device:
            self._pending = verdict
            with switched_off_if(optimizer, verdict.bad.on_device):
                yield True
        else:
            self._settle(verdict)
            yield not verdict.bad.is_up()

    @property
    def num_skipped(self) -> int:
        """Updates that were left out, as far as the host knows."""
        return self._num_skipped + (0 if self.captured is None else self.captured.num_skipped)

    def settle(self) -> None:
        """Reports now what the next update would report: one that the device has left out. Collective.

        Raises:
            NonFiniteGradient: as `update`.
        """
        earlier, self._pending = self._pending, None
        if earlier is not None:
            self._settle(earlier)
            earlier.marks.clear()  # which hold gradients, while updates are replayed too
        if self.captured is not None:
            self.captured.settle()

    def _settle(self, verdict: _Verdict) -> None:
        if verdict is self._settled or not verdict.bad.is_up():
            return
        self._settled = verdict
        self._num_skipped += 1
        may_be_scale = None if bool(verdict.bad_weight) else verdict.loss_scale
        tell_non_finite(self._policy, verdict.step, all_gather_object(self._report(verdict)), may_be_scale)

    def _report(self, verdict: _Verdict) -> dict[str, Any]:
        """What this rank's own gradients and losses were like."""
        finite_losses = [bool(loss.isfinite().all()) for loss in verdict.losses]
        for micro_step, marks in enumerate(verdict.marks):
            spoilt = [index for index, mark in marks.items() if not bool(_values(mark).isfinite().all())]
            if spoilt:
                loss_is_finite = finite_losses[micro_step] if micro_step < len(finite_losses) else True
                names = [self._names[index] for index in spoilt]
                return {"micro_step": micro_step, "names": names, "loss_is_finite": loss_is_finite, "explicit": bool(verdict.losses)}
        return {"micro_step": None}


def raise_flag(flag: Tensor, sums: Sequence[Tensor]) -> None:
    """Sets `flag` to 1 if an element of any is not finite."""
    if flag.device.type == "cpu":
        raise_by_sums(flag, sums)
        return
    checked = [] if non_finite_check is None else [values for values in sums if values.dtype in _CHECKED_DTYPES]
    for dtype in {values.dtype for values in checked}:
        non_finite_check([values for values in checked if values.dtype is dtype], flag, _one(flag.device))
    raise_by_norms(flag, [values for values in sums if non_finite_check is None or values.dtype not in _CHECKED_DTYPES])


def raise_for_weight(flag: Tensor, sums: Sequence[Tensor], bad_weight: bool | Tensor) -> None:
    """Sets `flag` to 1 if there is a gradient that is to be divided by a bad weight."""
    for values in sums:
        if values.numel() > 0:
            flag.masked_fill_((torch.linalg.vector_norm(values, math.inf) != 0) & bad_weight, 1.0)


def raise_everywhere(flag: Tensor, algorithm: str = "native") -> None:
    """Sets `flag` to 1 if it is on any rank. Collective."""
    all_reduce_flat(flag.view(1), algorithm).wait()
    flag.clamp_(max=1.0)


def raise_by_sums(flag: Tensor, sums: Sequence[Tensor]) -> None:
    """On a CPU: a sum is ten times as fast as looking at each element, which need be done only if it is not finite (or too large)."""
    suspects = [values for values in sums if not bool(_sum(values).isfinite())]
    flag.fill_(float(any(not bool(values.isfinite().all()) for values in suspects)))


def raise_by_norms(flag: Tensor, sums: Sequence[Tensor]) -> None:
    """Where torch has no kernel for it (bfloat16): the largest magnitudes, on the device."""
    for values in sums:
        flag.masked_fill_(~torch.linalg.vector_norm(values, math.inf).isfinite(), 1.0)


@lru_cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def norms(gradients: Marks) -> Marks:
    """In the place of each gradient a number that is finite only if it is."""
    there = {index: _values(gradient) for index, gradient in gradients.items() if gradient.numel() > 0}
    values = list(there.values())
    if norms_of_many is None or not values or values[0].device.type == "cpu":
        return dict(zip(there, map(extremes, values), strict=True))
    return dict(zip(there, norms_of_many(values, math.inf), strict=True))


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None)


def tell_non_finite(policy: NonFinitePolicy, step: int, reports: Sequence[dict[str, Any]], loss_scale: LossScale | None) -> None:
    """Reports update `step`, which was left out, as `policy` says, from what each rank says of its own; unless a smaller loss scale may mend it.

    Raises:
        NonFiniteGradient: the policy is "raise".
    """
    if loss_scale is not None and loss_scale.can_sink() and all(report.get("loss_is_finite", True) for report in reports):
        return
    text = explain_non_finite(step, reports)
    if policy == "raise":
        raise NonFiniteGradient(f'{text} Look at that batch, lower the learning rate, or go on without such updates: non_finite="skip"')
    if policy == "warn":
        log.get_logger().warning("%s", text)


def explain_non_finite(step: int, reports: Sequence[dict[str, Any]]) -> str:
    """What was wrong with the gradient of update `step`, from what each rank says of its own."""
    clauses = []
    for rank, report in enumerate(reports):
        if report["micro_step"] is not None:
            loss = "" if report["loss_is_finite"] else ", whose loss was not finite either"
            micro_step = f"first at micro-step {report['micro_step']}{loss}, " if report["explicit"] else ""
            clauses.append(f"on rank {rank} {micro_step}in {_say(report['names'])}")
    where = "; ".join(clauses) or (
        "though each rank's own gradients were: their sum is too large for its type, or the weights of the global batch are zero, negative or "
        "not finite"
    )
    return f"all gradients must be finite, but those of update {step} were not, {where}. No rank applied it."


def _say(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(repr(name) for name in names[:_SHOWN]) + (f" and {more} more parameters" if more > 0 else "")
