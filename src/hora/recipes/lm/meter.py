"""Sums over a stretch of training, kept on the device so that no step waits for them, and the perplexity that they make."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hora.comm.collectives import all_gather
from hora.comm.session import session
from hora.errors import HoraError


class NonFiniteLoss(HoraError):
    """The loss of a step was no finite number, so the model is spoilt."""


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

    There is a sum for each logical rank, so that it does not depend on who plays which, and in exact mode the total is the same to the last bit.

    Args:
        device: where the losses are.
        phase: what the steps are steps of, for messages.
    """

    def __init__(self, device: torch.device, phase: str = "training") -> None:
        self._device = device
        self._phase = phase
        self._count = session().logical_ranks.count
        self._nll: Tensor
        self._tokens: int
        self._first_bad: Tensor
        self.load([])

    def add(self, loss_sum: Tensor, tokens: int, step: int, logical_rank: int) -> None:
        """Adds a micro-batch of step number `step` that belongs to `logical_rank`."""
        self._nll[logical_rank] += loss_sum.detach()
        self._tokens += tokens
        self._first_bad = torch.where(loss_sum.detach().isfinite(), self._first_bad, self._first_bad.clamp(max=step))

    def collect(self) -> Tally:
        """What all ranks have added since the last time; begins anew. Collective.

        Raises:
            NonFiniteLoss: on all ranks, when a number was not finite on any.
        """
        parts = self.read()
        self.load([])
        return total(parts)

    def read(self) -> list[Tally]:
        """The sums of all logical ranks since the last time; goes on adding. Collective.

        Raises:
            NonFiniteLoss: as in `collect`.
        """
        mine = torch.cat((self._first_bad[None], self._nll.new_tensor([self._tokens]), self._nll))
        rows = [part.squeeze(0).tolist() for part in all_gather(mine[None])]
        first_bad = min(row[0] for row in rows)
        if first_bad < math.inf:
            ranks = ", ".join(str(rank) for rank, row in enumerate(rows) if row[0] == first_bad)
            raise NonFiniteLoss(
                f"the loss must be finite, but is not in step {first_bad:.0f} of {self._phase} (rank {ranks}); no checkpoint has "
                "been written since: go on with --resume and a lower optimizer.lr or optimizer.clip_norm"
            )
        # Each logical rank's sum is one rank's and zero elsewhere; the tokens need no place of their own.
        tokens = [int(sum(row[1] for row in rows)), *[0] * (self._count - 1)]
        return [Tally(sum(column), part) for column, part in zip(list(zip(*rows, strict=True))[2:], tokens, strict=True)]

    def load(self, parts: Sequence[Tally]) -> None:
        """Begins with sums by logical rank, as `read` gives them; of a run with another number of logical ranks all of them as one. Local:
        each rank takes those that it plays, rank 0 the tokens.
        """
        here = session()
        if len(parts) != self._count:
            parts = [total(parts), *[Tally()] * (self._count - 1)]
        played = here.logical_ranks.played_by(here.rank)
        sums = [part.nll if index in played else 0.0 for index, part in enumerate(parts)]
        self._nll = torch.tensor(sums, dtype=torch.float64, device=self._device)
        self._tokens = total(parts).tokens if here.rank == 0 else 0
        self._first_bad = torch.tensor(math.inf, dtype=torch.float64, device=self._device)


def total(parts: Sequence[Tally]) -> Tally:
    """All parts together. fsum: the same sum in whatever order."""
    return Tally(math.fsum(part.nll for part in parts), sum(part.tokens for part in parts))
