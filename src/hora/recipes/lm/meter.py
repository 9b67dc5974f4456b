"""Sums over a stretch of training, kept on the device so that no step waits for them, and the perplexity that they make."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hora.comm.collectives import all_gather
from hora.errors import HoraError


class NonFiniteLoss(HoraError):
    """The loss or the gradient of a step was no finite number, so the model is spoilt from there on."""


@dataclass(frozen=True)
class Tally:
    """Negative log-likelihood in nats of so many tokens."""

    nll: float = 0.0
    tokens: int = 0

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nll / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """The number of equally likely words that would be as hard to tell."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.nll + other.nll, self.tokens + other.tokens)


class Meter:
    """Adds up the losses of this rank's micro-batches in float64 and notes the first step whose numbers were not finite.

    Args:
        device: where the losses are.
        phase: what the steps are steps of, for messages.
    """

    def __init__(self, device: torch.device, phase: str = "training") -> None:
        self._device = device
        self._phase = phase
        self._nll: Tensor
        self._tokens: int
        self._first_bad: Tensor
        self.load(Tally())

    def add(self, loss_sum: Tensor, tokens: int, step: int) -> None:
        """Adds a micro-batch of step number `step`."""
        self._nll = self._nll + loss_sum.detach()
        self._tokens += tokens
        self.watch(loss_sum.detach(), step)

    def watch(self, value: Tensor, step: int) -> None:
        """Notes `step` if `value` is not finite."""
        self._first_bad = torch.where(value.isfinite(), self._first_bad, self._first_bad.clamp(max=step))

    def collect(self) -> Tally:
        """What all ranks have added since the last time; begins anew. Collective.

        Raises:
            NonFiniteLoss: on all ranks, when a number was not finite on any.
        """
        tally = self.read()
        self.load(Tally())
        return tally

    def read(self) -> Tally:
        """As `collect`, but goes on adding."""
        mine = torch.stack((self._nll, self._nll.new_tensor(self._tokens), self._first_bad))
        parts = [part.squeeze(0).tolist() for part in all_gather(mine[None])]
        first_bad = min(part[2] for part in parts)
        if first_bad < math.inf:
            ranks = ", ".join(str(rank) for rank, part in enumerate(parts) if part[2] == first_bad)
            raise NonFiniteLoss(
                f"loss and gradient must be finite, but one is not in step {first_bad:.0f} of {self._phase} (rank {ranks}); no checkpoint has "
                "been written since: go on with --resume and a lower optimizer.lr or optimizer.clip_norm"
            )
        # fsum: the same sum in whatever order, so that every rank has it to the last bit.
        return Tally(math.fsum(part[0] for part in parts), int(sum(part[1] for part in parts)))

    def load(self, tally: Tally) -> None:
        """Begins with what this rank had added before."""
        self._nll, self._tokens = torch.tensor(tally.nll, dtype=torch.float64, device=self._device), tally.tokens
        self._first_bad = torch.tensor(math.inf, dtype=torch.float64, device=self._device)
