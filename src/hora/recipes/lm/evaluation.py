"""Perplexity of a text, measured by all ranks together and equal to what one process measures.

Every token but the first is predicted exactly once. The rows, and where each begins, depend on the configuration alone; ranks share them, and
what they sum is reduced in float64.
"""

import torch
from torch import Tensor

from hora.comm.session import session
from hora.data.streams import TextStream
from hora.recipes.lm.carry import initial_states
from hora.recipes.lm.config import DataConfig
from hora.recipes.lm.model import LanguageModel, nll_sum
from hora.recipes.meter import Meter, Tally


@torch.no_grad()
def evaluate(model: LanguageModel, tokens: Tensor, data: DataConfig) -> Tally:
    """Reads `tokens` `[num_tokens]` with the model as it is, without dropout, and leaves it in training mode. Collective.

    Raises:
        NonFiniteLoss: the model gives no finite likelihood.
    """
    stream = TextStream(tokens, global_batch_size=data.rows, window=data.window, micro_batch_size=data.micro_batch_size, drop_last=False)
    states, meter = initial_states(model, stream.micro_batches), Meter(session().device)
    model.eval()
    for step in stream:
        for place, ((inputs, targets), logical_rank) in enumerate(zip(step, step.logical_ranks, strict=True)):
            # In the last window only longer rows read on, which are the first ones.
            state = tuple(tensor[:, : len(inputs)].contiguous() for tensor in states[place])
            logits, states[place] = model(inputs, state)
            meter.add(nll_sum(logits, targets), targets.numel(), step.index, logical_rank)
    model.train()
    return meter.collect()
