"""Sums over a stretch of training, kept on the device so that no step waits for them, and the perplexity that they make."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hora.comm.collectives import all_gather
from hora.comm.session import session
from hora.errors import HoraError


class NonFiniteLoss(HoraError, ArithmeticError):
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
    """Adds up the losses of this rank's micro-batches of one evaluation in float64 and notes the first step whose numbers were not finite.

    There is a sum for each logical rank, so that it does not depend on who plays which, and in exact mode the total is the same to the last bit.
    """

    def __init__(self, device: torch.device) -> None:
        self._nll = torch.zeros(session().logical_ranks.count, dtype=torch.float64, device=device)
        self._num_tokens = 0
        self._first_bad = torch.tensor(math.inf, dtype=torch.float64, device=device)

    def add(self, loss_sum: Tensor, num_tokens: int, step: int, logical_rank: int) -> None:
        """Adds a micro-batch of step number `step` that belongs to `logical_rank`."""
        self._nll[logical_rank] += loss_sum.detach()
        self._num_tokens += num_tokens
        self._first_bad = torch.where(loss_sum.detach().isfinite(), self._first_bad, self._first_bad.clamp(max=step))

    def collect(self) -> Tally:
        """What all ranks have added. Collective.

        Raises:
            NonFiniteLoss: on all ranks, when a number was not finite on any.
        """
        mine = torch.cat((self._first_bad[None], self._nll.new_tensor([self._num_tokens]), self._nll))
        rows = [part.squeeze(0).tolist() for part in all_gather(mine[None])]
        first_bad = min(row[0] for row in rows)
        if first_bad < math.inf:
            ranks = ", ".join(str(rank) for rank, row in enumerate(rows) if row[0] == first_bad)
            raise NonFiniteLoss(f"the loss must be finite, but is not in step {first_bad:.0f} of an evaluation (rank {ranks}); {_REMEDY}")
        # Each logical rank's sum is one rank's and zero elsewhere. fsum: the same sum in whatever order.
        return Tally(math.fsum(number for row in rows for number in row[2:]), int(sum(row[1] for row in rows)))


class RunningTally:
    """Adds up the losses of training steps, which are of all ranks already, on the device, so that no step waits for them.

    `counted` is what an error calls what losses are of.
    """

    def __init__(self, device: torch.device, counted: str = "tokens") -> None:
        self._nll = torch.zeros((), dtype=torch.float64, device=device)
        self._num_tokens, self._counted = 0, counted

    def add(self, nll: Tensor, num_tokens: int) -> None:
        """Adds the loss of a step, summed over the tokens of its global batch."""
        self._nll += nll
        self._num_tokens += num_tokens

    def read(self) -> Tally:
        """What was added since the last `reset`.

        Raises:
            NonFiniteLoss: on all ranks alike, when a loss was not finite.
        """
        nll = float(self._nll)
        if not math.isfinite(nll):
            raise NonFiniteLoss(
                f"the loss must be finite, but is not in one of the last {self._num_tokens:,} {self._counted} of training; {_REMEDY}"
            )
        return Tally(nll, self._num_tokens)

    def reset(self, tally: Tally | None = None) -> None:
        """Begins anew, or goes on from what `read` gave."""
        self._nll.fill_(tally.nll if tally else 0.0)
        self._num_tokens = tally.tokens if tally else 0


_REMEDY = (
    "no checkpoint has been written since: train with a lower learning rate, or clip the gradient to a smaller norm; with --resume from the "
    "last checkpoint, if there is one"
)
