"""What an update is while it is captured into a CUDA graph, and what the hosts do when the graph is replayed.

The part of an update that runs on the device (gradients, sums, the look at them, clipping, the optimizer) is captured as the synchroniser and the
optimizer carry it out anyway. The hosts' part is not: nothing is said to other ranks, counted or waited for then. Two objects stand in for those that
do it: `GivenWeight` for the control message, since the weight of the global batch is a sum on the device, and `CapturedChecks` for the look at
gradients, since nobody reads a flag between two replays.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hora.comm.deadline import Deadline
from hora.comm.objects import all_gather_object
from hora.comm.peer_memory import Divisor
from hora.comm.session import session
from hora.errors import CollectiveTimeout
from hora.sync.beside import Beside
from hora.sync.checks import NonFinitePolicy
from hora.sync.control import Place
from hora.sync.finite import Marks, norms, raise_everywhere, tell_non_finite
from hora.sync.gradients import GradientBucket
from hora.sync.loss_scale import LossScale

_LAG = 2
"""Replays that may be under way on the device while the host goes on: with one the device would wait for the host between two short steps."""

_POLL_S = 2e-5

_SOON_LOOKED_AT_BYTES = 16 * 2**20
"""Gradients up to this size are looked at in a few microseconds."""

FLAG_ALGORITHM = "symmetric"
"""In memory that GPUs share, where they do, a flag need not queue up behind sums that NCCL has been given before."""


class StepWeight(Protocol):
    """Who adds up the weight of a global batch on the device."""

    def total_weight(self) -> tuple[Tensor, Tensor]:
        """The weight, when the sums are complete, and whether it is a bad one."""

    def soon(self) -> Divisor:
        """The same weight, for those who can wait for it while backward goes on."""


class GivenWeight:
    """The weight of the global batch, which `step` adds up; nothing is told to anybody."""

    stop_agreed = waits_agreed = False

    def __init__(self, step: StepWeight) -> None:
        self._step = step
        self.suspicious: bool | Tensor = False

    def begin(self, step: int, place: Place, weights: Mapping[int, float | Tensor], stop: bool, waits: bool) -> None:
        """Nothing to say."""

    def agree(self) -> None:
        """The ranks have agreed on the replay; the hosts never know the weight."""

    def soon(self) -> Divisor:
        """The weight, on the device, from the beginning of backward on."""
        return self._step.soon()

    def end(self) -> Tensor:
        """The weight, on the device."""
        total, self.suspicious = self._step.total_weight()
        return total


class CapturedChecks:
    """The look at gradients of updates that are replayed: an update that is not finite is switched off on the device and counted there.

    What the first of them was like is kept on the device until the host asks, which it does two replays later at the latest. All ranks see the same
    count, for it is of the sums.

    Args:
        names: of the parameters.
        parameters: those that get gradients.
        policy: what happens to an update that is not finite.
        wire_dtype: what gradients travel as, None: as they are.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        policy: NonFinitePolicy,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._names, self._parameters, self._policy = names, parameters, policy
        device = parameters[0].device
        dtypes = [torch.float32, *(parameter.dtype for parameter in parameters), *([] if wire_dtype is None else [wire_dtype])]
        largest = min(torch.finfo(dtype).max for dtype in dtypes)
        self._surely_summed = largest / session().logical_ranks.count
        self._flag = torch.zeros((), device=device)
        self._zero, self._one = torch.zeros_like(self._flag), torch.ones_like(self._flag)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        # By number of micro-steps, [micro-steps, 1 + parameters]: the loss, then each parameter's gradient.
        self._first: dict[int, Tensor] = {}
        self._stream = torch.cuda.Stream(device)
        self._beside = Beside(self._stream)
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._looks: list[Marks] = []
        self._largest: list[Tensor] = []
        self._early: Marks = {}
        self._to_look_at: Sequence[nn.Parameter] = ()
        self._losses: list[Tensor] = []
        self._host = [torch.zeros((), dtype=torch.int64, device="cpu").pin_memory() for _ in range(_LAG)]
        self._arrived = [torch.cuda.Event() for _ in range(_LAG)]
        self._steps: list[int] = []
        self._num_replayed = 0
        self._loss_scale: LossScale | None = None
        self._bad_weights = torch.zeros_like(self._count)
        self.num_skipped = 0

    def prepare(self, num_micro_steps: int) -> None:
        """Makes room for what an update of so many micro-steps was like, which must be there before it is captured."""
        if num_micro_steps not in self._first:
            shape = num_micro_steps, 1 + len(self._parameters)
            self._first[num_micro_steps] = torch.zeros(shape, device=self._flag.device)

    @property
    def are_on(self) -> bool:
        """Whether anything is looked at."""
        return self._policy != "ignore"

    # In the place of `FiniteGradients`, while captured ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A window begins."""
        self._looks, self._losses, self._largest, self._early, self._to_look_at = [], [], [], {}, ()
        self._beside = Beside(self._stream)

    def note(self, losses: Sequence[Tensor], *, last: bool) -> None:
        """A micro-step is done."""
        if self.are_on:
            with self._beside.running(losses):
                self._losses.append(torch.stack([loss.detach().float() for loss in losses]).sum())
            if not last:
                self._look_at_own()
                self._beside.join()  # the next micro-step adds to these gradients

    def look_early(self, bucket: GradientBucket) -> None:
        """The gradients of `bucket` are this rank's own, of all micro-steps, and are looked at while backward goes on, if they have not been when
        they were copied.

        If they are many, when the next ones come, which are in their bucket then: the sum of that must not begin later.
        """
        if self.are_on:
            if bucket.largest is not None:
                self._largest.append(bucket.largest)
                self._early |= {self._index[id(bucket.parameters[member])]: mark for member, mark in bucket.own_marks.items()}
            parameters = [parameter for member, parameter in enumerate(bucket.parameters) if member not in bucket.own_marks]
            many = sum(parameter.nbytes for parameter in parameters) > _SOON_LOOKED_AT_BYTES
            now = self._to_look_at if many else [*self._to_look_at, *parameters]
            self._to_look_at = parameters if many else ()
            self._look_at({self._index[id(parameter)]: parameter.grad for parameter in now if parameter.grad is not None})

    def keep_own(self) -> None:
        """`.grad` are this rank's own, of all micro-steps."""
        if self.are_on and self._losses:
            self._look_at_own()

    def look(self, step: int, bad_weight: bool | Tensor = False, loss_scale: LossScale | None = None) -> Tensor | None:  # noqa: ARG002
        """The gradients are on their way; `bad_weight`: their sums are not to be divided by theirs. Collective.

        Nobody waits for the sums: they are finite if the gradients of all ranks are, and not so large that as many as there are ranks might be
        too large together.

        Returns:
            A scalar that is 1 if they are bad, else 0; None if nobody looks.
        """
        if not self.are_on:
            return None
        self._loss_scale = loss_scale
        if loss_scale is not None:
            self._bad_weights.add_(torch.as_tensor(bad_weight, device=self._flag.device).long())
        with self._beside.running([bad_weight, *self._largest]):
            largest = torch.cat([self._zero[None], *self._largest]).amax()
            torch.where(largest <= self._surely_summed, self._zero, self._one, out=self._flag)  # what is no number is not less than any
            raise_everywhere(self._flag, FLAG_ALGORITHM)
            self._flag.masked_fill_(torch.as_tensor(bad_weight, device=self._flag.device), 1.0)
        self._beside.join()
        with self._beside.running([self._flag]):
            looks = torch.stack([torch.stack([loss, *self._row(look)]) for loss, look in zip(self._losses, self._looks, strict=True)])
            first = self._first[len(looks)]
            first.copy_(torch.where((self._flag > 0) & (self._count == 0), looks, first))
            self._count.add_(self._flag.long())
        return self._flag

    @property
    def flag(self) -> Tensor | None:
        """1 if the update is to be left out; None if nobody looks."""
        return self._flag if self.are_on else None

    def join(self) -> None:
        """All that went on beside the step is done."""
        self._beside.join()

    def _look_at_own(self) -> None:
        """Looks at what has not been looked at of a micro-step's gradients."""
        own = enumerate(self._parameters)
        self._look_at({index: parameter.grad for index, parameter in own if parameter.grad is not None and index not in self._early})
        self._looks.append(self._early)
        self._early = {}

    def _look_at(self, gradients: Marks) -> None:
        if any(gradient.numel() for gradient in gradients.values()):
            with self._beside.running(gradients.values()):
                found = {index: norm.float() for index, norm in norms(gradients).items()}
                self._largest.append(torch.stack(list(found.values())))
            self._early |= found

    def _row(self, look: Marks) -> list[Tensor]:
        """For each parameter what is finite only if its gradient is."""
        return [look.get(index, self._zero) for index in range(len(self._parameters))]

    # For the host, when replayed ----------------------------------------------------------------------------------------------------------

    def before_replay(self) -> None:
        """Waits until no more than a replay is under way, and reports what that before it was. Collective if there is something to report.

        Raises:
            NonFiniteGradient: its gradient was not finite, and the policy says so.
            CollectiveTimeout: it does not end by the session's deadline.
        """
        if len(self._steps) == _LAG:
            self._look_back()

    def after_replay(self, step: int) -> None:
        """The graph of update `step` has been queued."""
        place = self._num_replayed % _LAG
        self._num_replayed += 1
        self._host[place].copy_(self._count, non_blocking=True)
        self._arrived[place].record()
        self._steps.append(step)

    def settle(self) -> None:
        """Waits for all that is under way and reports it. Collective if there is something to report."""
        while self._steps:
            self._look_back()

    def _look_back(self) -> None:
        step, num_bad = self._await_oldest()
        if num_bad > 0:
            self._tell(step)

    def _await_oldest(self) -> tuple[int, int]:
        """The oldest update that is under way, once it is done, and how many had been left out by then."""
        place = (self._num_replayed - len(self._steps)) % _LAG
        await_event(self._arrived[place], session().timeout_s)
        return self._steps.pop(0), int(self._host[place])

    def _tell(self, step: int) -> None:
        while self._steps:  # later replays may have been bad too: all are told of together, as what the first was like
            self._await_oldest()
        self.num_skipped += int(self._count)
        self._count.zero_()
        may_be_scale = None if int(self._bad_weights) else self._loss_scale
        self._bad_weights.zero_()
        tell_non_finite(self._policy, step, all_gather_object(self._report()), may_be_scale)

    def _report(self) -> dict[str, Any]:
        """What this rank's own gradients and losses were like."""
        report: dict[str, Any] = {"micro_step": None}
        for first in self._first.values():
            for micro_step, (loss, *finite) in enumerate(first.isfinite().tolist()):
                names = [name for name, good in zip(self._names, finite, strict=True) if not good]
                if names and report["micro_step"] is None:
                    report = {"micro_step": micro_step, "names": names, "loss_is_finite": loss, "explicit": True}
            first.zero_()
        return report


def await_event(event: torch.cuda.Event, timeout_s: float) -> None:
    """Waits for what the device does before `event`, which may be a collective in a graph that no watchdog sees.

    Raises:
        CollectiveTimeout: it is not done within `timeout_s`.
    """
    deadline = Deadline(timeout_s)
    while not event.query():
        time.sleep(_POLL_S)
        if deadline.passed:
            here = session()
            call = here.progress.begin("replayed update", [])
            raise here.progress.explain(call, CollectiveTimeout(f"timed out after {timeout_s:g} s"))
