"""The factor on the loss that keeps gradients inside the range of float16 on their way back through the model.

It is lowered when a sum of gradients over the ranks is not finite, and raised after a stretch without that, as in *Mixed Precision Training*
(Micikevicius et al., ICLR 2018, arXiv:1710.03740) and `torch.amp.GradScaler`, whose figures it has. The sums are the same on every rank, and so
are the factor and what becomes of the update. Kept on the device: nobody waits for it, and a CUDA graph can hold it.
"""

from typing import Any

import torch
from torch import Tensor

from hora.errors import CheckpointMismatch

_FIRST, _LEAST, _MOST = 2.0**16, 2.0**-14, 2.0**24
_LOWERED, _RAISED = 0.5, 2.0
_STRETCH = 2000
"""Updates in a row with finite gradients after which the factor is raised."""


class LossScale:
    """A power of two, so that it changes no digit of what it does not save or spoil.

    Attributes:
        value: the factor now, a float32 scalar on `device`, in place.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), _FIRST, device=device)
        self._num_good = torch.zeros((), device=device)

    @torch.no_grad()
    def adapt(self, flag: Tensor, bad_weight: bool | Tensor = False) -> None:
        """An update is through; `flag`, a scalar, is 1 if its gradient was not finite, else 0. `bad_weight`: which is not the scale's fault."""
        bad = flag > 0
        if bad_weight is not False:  # else the host would wait for a GPU, to bring it a word that changes nothing
            bad &= ~torch.as_tensor(bad_weight, device=flag.device)
        self._num_good.add_(1).masked_fill_(bad, 0)
        raised = self._num_good >= _STRETCH
        self.value.copy_(torch.where(bad, _LOWERED * self.value, torch.where(raised, _RAISED * self.value, self.value))).clamp_(
            _LEAST, _MOST
        )
        self._num_good.masked_fill_(raised, 0)

    def can_sink(self) -> bool:
        """Whether a smaller factor is left to be tried. Waits for the device."""
        return float(self.value) > _LEAST

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain numbers. Waits for the device."""
        return {"scale": float(self.value), "good_updates": int(self._num_good)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave.

        Raises:
            CheckpointMismatch: it is no such state.
        """
        scale, num_good = state.get("scale"), state.get("good_updates")
        if not (isinstance(scale, (int, float)) and _LEAST <= scale <= _MOST and isinstance(num_good, int) and num_good >= 0):
            raise CheckpointMismatch(f"a loss scale must be saved as scale and good_updates, but the checkpoint has {state}")
        self.value.fill_(scale)
        self._num_good.fill_(num_good)
