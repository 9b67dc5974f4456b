"""What the ranks tell each other in each update beside the gradients: the weight of their samples, flags, which update of which model it is, and
with which step of the data.

It rides on the roll call of the update (`comm.roll_call`), between the hosts, sent when the last backward begins, so that it costs nothing
behind a backward pass. Its numbers are float64, which counts exactly up to 2^53; no gradient type does (bfloat16 cannot say 257), which is why
the weight does not travel in a bucket (docs/design/control-message.md). No gradient moves before all ranks have said the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hora import events
from hora.comm.diagnosis import Call
from hora.comm.flat import all_reduce_flat
from hora.comm.records import say_ranks
from hora.comm.roll_call import Answers
from hora.comm.session import session
from hora.errors import CollectiveMismatch
from hora.plan.logical import LogicalRanks

T = TypeVar("T")

LEAST_WEIGHT = 1e-30
"""What a global batch without weight is divided by: its sums are zero and stay so. Every type that gradients are divided in can say it."""


class Place(NamedTuple):
    """The step of the data that an update is made with."""

    epoch: int
    step: int

    @classmethod
    def of(cls, step: Any) -> "Place":
        """Where `step` is; NOWHERE unless it is one that all ranks of the job are to be at together."""
        return cls(step.epoch, step.index) if getattr(step, "of_job", False) else NOWHERE


NOWHERE = Place(-1, -1)


class ControlMessage:
    """One exchange after another; `begin` and `end` are collective and called once an update.

    The weights of `num_weights` parts of the global batch have a number each: outside exact mode one a rank, in exact mode one a logical rank,
    which one rank gives, so that they are summed in one order.

    Args:
        plan: of the gradients, the same on ranks with the same model.
        model: its name and parameters in a few words, for an error.
        device: of the weight.
        num_weights: parts of the global batch.

    Attributes:
        stop_agreed: whether some rank asked to stop.
        waits_agreed: whether some rank's host must know whether the gradient is finite before it updates.
        suspicious: whether the weight that `end` gave last is none that a gradient can be divided by: not positive, or not finite.
    """

    def __init__(self, plan: str, model: str, device: torch.device, num_weights: int = 1):
        self._plan = plan
        self._model = model
        self._device = device
        self._num_weights = num_weights
        self._answers: Answers | None = None
        self._call: Call | None = None
        self._on_device: Tensor | None = None
        self._agreed: Tensor | None = None
        self._latest: tuple[float, Tensor] | None = None
        self.stop_agreed = False
        self.waits_agreed = False
        self.suspicious: bool | Tensor = False

    def begin(self, step: int, place: Place, weights: Mapping[int, float | Tensor], stop: bool, waits: bool) -> None:
        """Sends this rank's numbers. Collective: returns at once."""
        here = session()
        known = [weights.get(part, 0.0) for part in range(self._num_weights)]
        # A weight that only the device knows is added up there, if any rank has one: reading it would make the host wait.
        unread = [isinstance(weight, Tensor) and weight.device.type != "cpu" for weight in known]
        self._on_device = self._lanes(known, unread) if any(unread) else None
        flags = [float(stop), float(waits), float(any(unread))]
        numbers = [*flags, *map(float, place), *(0.0 if there else float(weight) for weight, there in zip(known, unread, strict=True))]
        self._agreed = None
        self._call = here.progress.begin("update", [])
        details = f"sum update {step} of {self._model}"
        self._answers = here.roll_call.begin(f"update {step} of {self._plan}", self._call, numbers=numbers, details=details)

    def agree(self) -> Tensor | None:
        """Returns when all ranks have said that they make this update of this model; again at once.

        Returns:
            On a CPU what `end` will return. On a GPU None: in a CUDA graph the weight comes with the sums, and other updates have its bits.

        It waits, on a GPU too, where NCCL's calls would not: buckets must leave at the same place of backward on all ranks, between the same
        other calls, so that whether the others' word has come cannot decide when.

        Raises:
            CollectiveMismatch: a rank does something else, or has come to another step of the data; on every rank alike.
            CollectiveTimeout, PeerLost: a rank does not come.
        """
        said = self._hear()
        if self._device.type == "cpu":
            self._agreed = self._total(said)
        return self._agreed

    def end(self) -> Tensor:
        """Returns the weight of the global batch as a float64 scalar on the device; next to nothing where no rank had a sample.

        Raises:
            CollectiveMismatch, CollectiveTimeout, PeerLost: as `agree`.
        """
        said = self._hear()
        assert self._call is not None
        session().progress.end(self._call)
        self.stop_agreed = any(stop for stop, *_ in said)
        self.waits_agreed = any(waits for _, waits, *_ in said)
        return self._total(said) if self._agreed is None else self._agreed

    def _total(self, said: Sequence[Sequence[float]]) -> Tensor:
        _, _, unread, _, _, *weights = zip(*said, strict=True)
        known = [sum(lane) for lane in weights]  # in exact mode one of these is one rank's, and the others add zero
        if any(unread):
            total = self._add_device_weights(known)
            self.suspicious = is_suspicious(total)
            return total.masked_fill(self.suspicious, LEAST_WEIGHT)
        weight = self._add(known, float.__add__)
        self.suspicious = not weight > 0 or weight == math.inf
        divisor = LEAST_WEIGHT if self.suspicious else weight
        if self._latest is None or divisor != self._latest[0]:  # most updates have the weight of the one before
            self._latest = divisor, torch.full((), divisor, dtype=torch.float64, device=self._device)
        return self._latest[1]

    def _hear(self) -> list[list[float]]:
        assert self._answers is not None
        events.observer().on_mark(events.Mark.AGREE_BEGIN)
        said = self._answers.wait()
        events.observer().on_mark(events.Mark.AGREE_END)
        require_one_place([(epoch, step) for _, _, _, epoch, step, *_ in said])
        return said

    def _lanes(self, known: list[float | Tensor], unread: list[bool]) -> Tensor:
        lanes = torch.zeros(self._num_weights, dtype=torch.float64, device=self._device)
        for part, (weight, there) in enumerate(zip(known, unread, strict=True)):
            if there:
                lanes[part] = weight.detach() if isinstance(weight, Tensor) else weight
        return lanes

    def _add_device_weights(self, known: list[float]) -> Tensor:
        lanes = self._lanes([], []) if self._on_device is None else self._on_device
        all_reduce_flat(lanes).wait()
        parts = (lanes + torch.tensor(known, dtype=torch.float64, device=self._device)).unbind()
        return self._add(parts, torch.add)

    def _add(self, parts: Sequence[T], add: Callable[[T, T], T]) -> T:
        """As the sums of a captured step add up the weights of logical ranks: in the order of the tree."""
        leaves = [(range(part, part + 1), weight) for part, weight in enumerate(parts)]
        return LogicalRanks(len(parts), 1).total(leaves, add)


def is_suspicious(total_weight: Tensor) -> Tensor:
    """Whether a gradient must not be divided by it, on its device."""
    return ~(total_weight > 0) | total_weight.isinf()


def require_one_place(places: Sequence[tuple[float, ...]]) -> None:
    """Refuses an update that ranks would make with different steps of the data.

    Args:
        places: epoch and step of each rank, as it told them.

    Raises:
        CollectiveMismatch: on every rank alike, since all were told the same.
    """
    found = set(places) - {NOWHERE}
    if len(found) <= 1:
        return
    at = {place: [rank for rank, other in enumerate(places) if other == place] for place in places if place in found}
    told = ", ".join(f"{say_ranks(ranks)} at step {step:.0f} of epoch {epoch:.0f}" for (epoch, step), ranks in at.items())
    raise CollectiveMismatch(
        f"all ranks must make an update with the same step of the data, or samples may be lost and others come twice, but are not: {told}; begin and "
        "leave loops over a loader on all ranks alike, also one that only looks at a batch"
    )
