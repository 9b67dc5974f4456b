"""The small message that rides beside the buckets of each update: the weight of this rank's samples, and flags.

One sum of a few float64 lanes a step, sent before the buckets so that it costs nothing behind a backward pass. float64 counts exactly up to
2^53, which no gradient type does (bfloat16 cannot say 257); that is why the weight has a message of its own and does not travel in a bucket
(docs/design/control-message.md). Numbers of the ranks' plans ride along: ranks whose plans or steps have drifted apart are told in the very step.
"""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from hora.comm.collectives import Work, all_reduce
from hora.errors import CollectiveMismatch

_STOP, _TICKET, _FLAGS = 0, 1, 2

LEAST_WEIGHT = 1e-30
"""What a global batch without weight is divided by: its sums are zero and stay so. Every type that gradients are divided in can say it."""


class ControlMessage:
    """One exchange after another; `begin` and `end` are collective and called once a step.

    The weights of `num_weights` parts of the global batch have a lane each: outside exact mode one that all ranks add to, in exact mode one a
    logical rank, which one rank writes, so that they are summed in one order.

    On a CPU the flags of a step are known in that step. On a GPU reading them would make the host wait for the device, so they are read one
    step later, on every rank alike.
    """

    def __init__(self, plan_digest: str, world_size: int, device: torch.device, num_weights: int = 1):
        self._plan_digest = plan_digest
        self._world_size = world_size
        self._device = device
        self._num_weights = num_weights
        self._lanes = torch.zeros(_FLAGS + num_weights, dtype=torch.float64, device=device)
        self._work: Work | None = None
        self._readings = (_Reading(device), _Reading(device))  # one is on its way while the other is looked at
        self.stop_agreed = False

    def begin(self, step: int, weights: Mapping[int, float | Tensor], stop: bool) -> None:
        """Sends this rank's lanes. Collective: returns at once, `end` waits."""
        known = [weights.get(part, 0.0) for part in range(self._num_weights)]
        lanes = [float(stop), float(self._ticket(step)), *(0.0 if isinstance(weight, Tensor) else float(weight) for weight in known)]
        self._lanes = torch.tensor(lanes, dtype=torch.float64).to(self._device, non_blocking=True)
        for part, weight in enumerate(known):
            if isinstance(weight, Tensor):
                self._lanes[_FLAGS + part] = weight.detach()
        self._work = all_reduce(self._lanes, async_op=True)

    def end(self, step: int) -> Tensor:
        """Returns the weight of the global batch as a float64 scalar on the device; next to nothing where no rank had a sample.

        Raises:
            CollectiveMismatch: the ranks are at different steps or have different gradients.
        """
        assert self._work is not None
        self._work.wait()
        current, before = self._readings[step % 2], self._readings[1 - step % 2]
        current.take(step, self._lanes[:_FLAGS])
        ripe = current if self._device.type == "cpu" else before
        if ripe.step is not None:
            self._look(ripe.step, ripe.values())
        return self._lanes[_FLAGS:].sum().clamp(min=LEAST_WEIGHT)

    def _look(self, step: int, values: list[float]) -> None:
        self.stop_agreed = values[_STOP] > 0
        if values[_TICKET] != self._ticket(step) * self._world_size:
            raise CollectiveMismatch(
                f"all ranks must send the gradients of the same model at the same step, but at update {step} of this rank another rank sent "
                "those of another update or model; look for a rank that skips a step, or that calls step() or backward() more often"
            )

    def _ticket(self, step: int) -> int:
        return zlib.crc32(f"{self._plan_digest} {step}".encode())


class _Reading:
    """The summed lanes of one step on their way to the host."""

    def __init__(self, device: torch.device):
        self.step: int | None = None
        self._host = torch.empty(_FLAGS, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None

    def take(self, step: int, lanes: Tensor) -> None:
        self.step = step
        self._host.copy_(lanes, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def values(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
