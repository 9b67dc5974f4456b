"""The small message that rides beside the buckets of each update: the weight of this rank's samples, and flags.

One sum of a few float64 lanes a step, sent before the buckets so that it costs nothing behind a backward pass. float64 counts exactly up to
2^53, which no gradient type does (bfloat16 cannot say 257); that is why the weight has a message of its own and does not travel in a bucket
(docs/design/control-message.md). Numbers of the ranks' plans ride along: ranks whose plans or steps have drifted apart are told in the very step.
"""

import zlib

import torch
from torch import Tensor

from hora.comm.collectives import Work, all_reduce
from hora.errors import CollectiveMismatch

_WEIGHT, _STOP, _TICKET, _LANES = 0, 1, 2, 3


class ControlMessage:
    """One exchange after another; `begin` and `end` are collective and called once a step.

    On a CPU the flags of a step are known in that step. On a GPU reading them would make the host wait for the device, so they are read one
    step later, on every rank alike.
    """

    def __init__(self, plan_digest: str, world_size: int, device: torch.device):
        self._plan_digest = plan_digest
        self._world_size = world_size
        self._device = device
        self._lanes = torch.zeros(_LANES, dtype=torch.float64, device=device)
        self._work: Work | None = None
        self._late: _Reading | None = None
        self.stop_agreed = False

    def begin(self, step: int, weight: float | Tensor, stop: bool) -> None:
        """Sends this rank's lanes. Collective: returns at once, `end` waits."""
        lanes = [0.0 if isinstance(weight, Tensor) else float(weight), float(stop), float(self._ticket(step))]
        self._lanes = torch.tensor(lanes, dtype=torch.float64).to(self._device, non_blocking=True)
        if isinstance(weight, Tensor):
            self._lanes[_WEIGHT] = weight.detach()
        self._work = all_reduce(self._lanes, async_op=True)

    def end(self, step: int) -> Tensor:
        """Returns the weight of the global batch as a float64 scalar on the device; 1 where no rank had a sample (all sums are zero then).

        Raises:
            CollectiveMismatch: the ranks are at different steps or have different gradients.
        """
        assert self._work is not None
        self._work.wait()
        reading = _Reading(step, self._lanes)
        if self._device.type == "cpu":
            self._look(reading)
        elif self._late is not None:
            self._look(self._late)
        self._late = reading
        total = self._lanes[_WEIGHT]
        return torch.where(total == 0, torch.ones_like(total), total)

    def _look(self, reading: "_Reading") -> None:
        values = reading.values()
        self.stop_agreed = values[_STOP] > 0
        if values[_TICKET] != self._ticket(reading.step) * self._world_size:
            raise CollectiveMismatch(
                f"all ranks must send the gradients of the same model at the same step, but at update {reading.step} of this rank another "
                "rank sent those of another update or model; look for a rank that skips a step, or that calls step() or backward() more often"
            )

    def _ticket(self, step: int) -> int:
        return zlib.crc32(f"{self._plan_digest} {step}".encode())


class _Reading:
    """The summed lanes of one step on their way to the host."""

    def __init__(self, step: int, lanes: Tensor):
        self.step = step
        self._host = torch.empty(lanes.shape, dtype=lanes.dtype, pin_memory=lanes.is_cuda)
        self._host.copy_(lanes, non_blocking=True)
        self._arrived = None
        if lanes.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def values(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
