"""How well classes were told: loss and counts, exact over any number of ranks."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hora.recipes.meter import Tally


@dataclass(frozen=True)
class Score:
    """Of so many images.

    Attributes:
        tally: the loss in nats, and the number of images.
        correct: images whose class came first.
        among_five: images whose class was among the first five.
    """

    tally: Tally = field(default_factory=Tally)
    correct: int = 0
    among_five: int = 0

    @property
    def loss(self) -> float:
        """Nats an image."""
        return self.tally.loss

    @property
    def top1(self) -> float:
        """Share of images whose class came first."""
        return self.correct / self.tally.tokens if self.tally.tokens else math.nan

    @property
    def top5(self) -> float:
        """Share of images whose class was among the first five."""
        return self.among_five / self.tally.tokens if self.tally.tokens else math.nan

    def __add__(self, other: "Score") -> "Score":
        return Score(self.tally + other.tally, self.correct + other.correct, self.among_five + other.among_five)


@torch.no_grad()
def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """How many of `labels` `[batch]` came first under `logits` `[batch, classes]`, and how many were among the first five: `[2]`, float64.

    Of classes that are equally likely the one with the smaller number comes first, as on every device alike.
    """
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    before = ((logits > own) | ((logits == own) & earlier)).sum(1)
    return torch.stack(((before < 1).sum(), (before < 5).sum())).double()
