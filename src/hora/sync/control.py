"""What the ranks tell each other in each update beside the gradients: the weight of their samples, flags, and which update of which model it is.

It rides on the roll call of the update (`comm.roll_call`), between the hosts, sent when the last backward begins, so that it costs nothing
behind a backward pass. Its numbers are float64, which counts exactly up to 2^53; no gradient type does (bfloat16 cannot say 257), which is why
the weight does not travel in a bucket (docs/design/control-message.md). No gradient moves before all ranks have said the same.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hora.comm.collectives import all_reduce_flat
from hora.comm.diagnosis import Call
from hora.comm.roll_call import Answers
from hora.comm.session import session

LEAST_WEIGHT = 1e-30
"""What a global batch without weight is divided by: its sums are zero and stay so. Every type that gradients are divided in can say it."""


class ControlMessage:
    """One exchange after another; `begin` and `end` are collective and called once an update.

    The weights of `num_weights` parts of the global batch have a number each: outside exact mode one a rank, in exact mode one a logical rank,
    which one rank gives, so that they are summed in one order.

    Args:
        plan: of the gradients, the same on ranks with the same model.
        describe: the model in a few words, for an error.
        device: of the weight.
        num_weights: parts of the global batch.
    """

    def __init__(self, plan: str, describe: Callable[[], str], device: torch.device, num_weights: int = 1):
        self._plan = plan
        self._describe = describe
        self._device = device
        self._num_weights = num_weights
        self._answers: Answers | None = None
        self._call: Call | None = None
        self._on_device: Tensor | None = None
        self._is_first = True
        self.stop_agreed = False

    def begin(self, step: int, weights: Mapping[int, float | Tensor], stop: bool) -> None:
        """Sends this rank's numbers. Collective: returns at once."""
        here = session()
        known = [weights.get(part, 0.0) for part in range(self._num_weights)]
        # A weight that only the device knows is added up there, if any rank has one: reading it would make the host wait.
        unread = [isinstance(weight, Tensor) and weight.device.type != "cpu" for weight in known]
        self._on_device = self._lanes(known, unread) if any(unread) else None
        numbers = [float(stop), float(any(unread)), *(0.0 if there else float(weight) for weight, there in zip(known, unread, strict=True))]
        self._call = here.progress.begin("update", [])
        self._answers = here.roll_call.begin(
            f"update {step} of {self._plan}", self._call, numbers=numbers, details=lambda: f"sum update {step} of {self._describe()}"
        )

    def agree(self) -> None:
        """Returns when buckets may be sent: when all ranks have said that they make this update of this model.

        On a GPU, from a model's second update on, at once: NCCL's calls cost the host no waiting and `end` refuses their result. Buckets must
        leave at the same place of backward on all ranks, between the same other calls, so whether the others' word has come cannot decide it.

        Raises:
            CollectiveMismatch: a rank does something else; on every rank alike.
            CollectiveTimeout, PeerLost: a rank does not come.
        """
        assert self._answers is not None
        if self._is_first or self._device.type == "cpu":
            self._answers.wait()

    def end(self) -> Tensor:
        """Returns the weight of the global batch as a float64 scalar on the device; next to nothing where no rank had a sample.

        Raises:
            CollectiveMismatch, CollectiveTimeout, PeerLost: as `agree`.
        """
        assert self._answers is not None
        assert self._call is not None
        said = self._answers.wait()
        session().progress.end(self._call)
        self._is_first = False
        self.stop_agreed = bool(said[:, 0].any())
        weights = said[:, 2:].sum(0)
        if bool(said[:, 1].any()):
            return self._add_device_weights(weights)
        return torch.full((), max(float(weights.sum()), LEAST_WEIGHT), dtype=torch.float64, device=self._device)

    def _lanes(self, known: list[float | Tensor], unread: list[bool]) -> Tensor:
        lanes = torch.zeros(self._num_weights, dtype=torch.float64, device=self._device)
        for part, (weight, there) in enumerate(zip(known, unread, strict=True)):
            if there:
                lanes[part] = weight.detach() if isinstance(weight, Tensor) else weight
        return lanes

    def _add_device_weights(self, weights: Tensor) -> Tensor:
        lanes = self._lanes([], []) if self._on_device is None else self._on_device
        all_reduce_flat(lanes).wait()
        return (lanes + weights.to(self._device)).sum().clamp(min=LEAST_WEIGHT)
