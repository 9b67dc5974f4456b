"""Is the gradient of the global batch finite? Asked of the sums, which are the same on every rank, so that all decide alike without a message.

On a CPU the answer is there at once. On a GPU it stays on the device: an optimizer that torch can switch off there (`fused=True`) is, in that very
step, and the hosts read the answer one step later; for others the host waits for it. Who spoilt the gradient, where and in which micro-step is
kept beside, on the device, and read only when something is wrong.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hora import log
from hora.comm.objects import all_gather_object
from hora.errors import NonFiniteGradient
from hora.sync.checks import NonFinitePolicy
from hora.sync.fused import switched_off_if, switches_off_on_device
from hora.sync.gradients import GradientBucket

_SHOWN = 3


@dataclass
class _Verdict:
    """What is known of the gradient of one update.

    Attributes:
        step: the update.
        bad: on the device, 1 where it is not finite, else 0.
        host: the same on the host, when `arrived` (None on a CPU: at once).
        marks: of this rank's own gradients, one row a micro-step: not finite where a parameter's gradient was not.
        losses: of the micro-steps.
    """

    step: int
    bad: Tensor
    host: Tensor
    arrived: "torch.cuda.Event | None"
    marks: list[Tensor]
    losses: list[Tensor]

    def is_bad(self) -> bool:
        """Waits for the device if need be."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return bool(self.host)


class FiniteGradients:
    """Watches the gradients of one model.

    Args:
        names: of the parameters.
        parameters: those that get gradients.
        buckets: in which the sums come to stand.
        policy: what happens to an update that is not finite.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], buckets: Sequence[GradientBucket], policy: NonFinitePolicy
    ):
        self._names = list(names)
        self._parameters = list(parameters)
        self._buckets = buckets
        self._policy = policy
        self._marks: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._marked = False
        self._verdict: _Verdict | None = None
        self._pending: _Verdict | None = None
        self._settled: _Verdict | None = None
        self.num_skipped = 0

    def begin(self) -> None:
        """A window begins."""
        self._marks, self._losses = [], []

    @torch.no_grad()
    def note(self, losses: Sequence[Tensor], *, last: bool) -> None:
        """A micro-step is done. The marks of the last one are made by `look`, behind the sums."""
        if self._policy != "ignore":
            self._losses.append(losses[0].detach() if len(losses) == 1 else torch.stack([loss.detach().float() for loss in losses]))
            if not last:
                self._marks.append(_marks([parameter.grad for parameter in self._parameters]))

    @torch.no_grad()
    def keep_own(self) -> None:
        """The window is complete; `.grad` are this rank's own, whose marks are made now where they could not be made in `look`."""
        self._marked = self._policy == "ignore"
        if any(parameter.device.type == "cuda" or _is_sparse(parameter) for parameter in self._parameters):
            self._mark()

    def _mark(self) -> None:
        if not self._marked:
            self._marks.append(_marks([parameter.grad for parameter in self._parameters]))
        self._marked = True

    @torch.no_grad()
    def look(self, step: int) -> None:
        """The buckets and sparse gradients hold the sums; other `.grad` are still this rank's own."""
        if self._policy == "ignore":
            return
        bad = _any_bad([bucket.gradients for bucket in self._buckets], [p.grad for p in self._parameters if _is_sparse(p)])
        on_gpu = bad.device.type == "cuda"
        if not on_gpu and bool(bad):
            self._mark()
        host = torch.empty((), pin_memory=True).copy_(bad, non_blocking=True) if on_gpu else bad
        arrived = torch.cuda.Event() if on_gpu else None
        if arrived is not None:
            arrived.record()
        self._verdict = _Verdict(step, bad, host, arrived, self._marks, self._losses)

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
        elif verdict.arrived is not None and switches_off_on_device(optimizer):
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
            spoilt = [index for index, mark in enumerate(marks.tolist()) if not math.isfinite(mark)]
            if spoilt:
                loss_is_finite = finite_losses[micro_step] if micro_step < len(finite_losses) else True
                names = [self._names[index] for index in spoilt]
                return {"micro_step": micro_step, "names": names, "loss_is_finite": loss_is_finite, "explicit": bool(verdict.losses)}
        return {"micro_step": None}


def _is_sparse(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _any_bad(sums: Sequence[Tensor], sparse: Sequence[Tensor | None]) -> Tensor:
    """1 where an element of any is not finite, else 0; float32, on their device."""
    values = [*sums, *(gradient.coalesce().values() for gradient in sparse if gradient is not None)]
    values = [value for value in values if value.numel() > 0]
    if values and values[0].device.type == "cpu":
        # A sum is ten times as fast as looking at each element, which need be done only if it is not finite (or too large).
        suspects = [value for value in values if not bool(_sum(value).isfinite())]
        return torch.tensor(float(any(not bool(value.isfinite().all()) for value in suspects)))
    if not values:
        return torch.zeros(())
    norms = torch.stack([torch.linalg.vector_norm(value, math.inf).float() for value in values])
    return (~norms.isfinite()).any().float()


def _marks(gradients: Sequence[Tensor | None]) -> Tensor:
    """A number for each gradient, finite only if it is; 0 where there is none."""
    values = {index: _values(gradient) for index, gradient in enumerate(gradients) if gradient is not None and gradient.numel() > 0}
    if not values:
        return torch.zeros(len(gradients))
    dense = list(values.values())
    together = getattr(torch, "_foreach_norm", None) if dense[0].device.type == "cuda" else None  # one kernel for many small tensors
    numbers = dict(zip(values, together(dense, math.inf) if together else map(_sum, dense), strict=True))
    none = torch.zeros((), device=dense[0].device)
    return torch.stack([numbers.get(index, none).float() for index in range(len(gradients))])


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
