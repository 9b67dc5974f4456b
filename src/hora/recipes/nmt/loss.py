"""The training loss: cross entropy with label smoothing, and what its sum is divided by."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hora.recipes.nmt.symbols import PAD

Normalization = Literal["tokens", "sentences", "means"]


class LossSums(NamedTuple):
    """Sums over a micro-batch, scalars on its device.

    Attributes:
        loss: with label smoothing; what is differentiated.
        weight: what the update divides the loss of the global batch by.
        nll: negative log-likelihood in nats, without smoothing.
    """

    loss: Tensor
    weight: Tensor
    nll: Tensor


def loss_sums(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, normalization: Normalization = "tokens") -> LossSums:
    """The loss of what is predicted by `logits` `[batch, time, size]` for `targets` `[batch, time]`, in float32; PAD counts nowhere.

    A target has the likelihood of `1 - label_smoothing`, and all of the vocabulary share the rest, as in
    `torch.nn.functional.cross_entropy`.

    Args:
        logits: of any floating-point type.
        targets: int64; a row that is PAD throughout is no sentence.
        label_smoothing: from 0 to below 1.
        normalization: the weight is the number of `tokens`, or of `sentences`; `means`: each sentence's loss is divided by its length, and the
            weight is the number of sentences.
    """
    logits = logits.float()
    counted = targets != PAD
    norm = logits.logsumexp(-1)
    nll = (norm - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)) * counted
    loss = nll
    if label_smoothing:
        loss = (1 - label_smoothing) * nll + label_smoothing * (norm - logits.mean(-1)) * counted
    lengths = counted.sum(1)
    if normalization == "means":
        loss = loss / lengths.clamp(min=1).unsqueeze(1)
    weight = lengths.sum() if normalization == "tokens" else (lengths > 0).sum()
    return LossSums(loss.sum(), weight.to(torch.float32), nll.detach().sum())
