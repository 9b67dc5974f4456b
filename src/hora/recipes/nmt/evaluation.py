"""Loss of a parallel text, measured by all ranks together and equal to what one process measures."""

import torch

from hora.comm.session import session
from hora.recipes.meter import Meter, Tally
from hora.recipes.nmt.loss import loss_sums
from hora.recipes.nmt.models import TranslationModel
from hora.recipes.nmt.stream import PairStream
from hora.recipes.nmt.symbols import PAD
from hora.train.precision import autocast
from hora.train.step.tree import to_device


@torch.no_grad()
def evaluate(model: TranslationModel, stream: PairStream, *, precision: str = "float32") -> Tally:
    """Nats and number of the target's tokens, ends of sentences among them, without label smoothing and dropout. Collective.

    Leaves the model in training mode.

    Raises:
        NonFiniteLoss: the model gives no finite likelihood.
    """
    device = session().device
    meter = Meter(device)
    model.eval()
    for step in stream:
        for batch, logical_rank in zip(step, step.logical_ranks, strict=True):
            num_tokens = int((batch[1][:, 1:] != PAD).sum())
            source, target = to_device(batch, device)
            with autocast(device, precision):
                logits = model(source, target[:, :-1])
            meter.add(loss_sums(logits, target[:, 1:]).nll, num_tokens, step.index, logical_rank)
    model.train()
    return meter.collect()
