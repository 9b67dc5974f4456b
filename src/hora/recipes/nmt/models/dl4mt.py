"""The attentional encoder-decoder of Bahdanau, Cho and Bengio (arXiv:1409.0473) as the DL4MT tutorial builds it, with a conditional GRU.

A decoder step is a GRU that reads the symbol before, additive attention that asks with its state, and a second GRU that reads what was found
(Sennrich et al., arXiv:1703.04357). Matrices begin uniform after Glorot and Bengio (each gate by itself), those of a GRU's state orthogonal, biases
zero, embeddings normal with variance `1 / d_word_vec`.
"""

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.models.base import (
    Memory,
    TranslationModel,
    draw_embedding,
    draw_matrix,
    project_unrounded,
    readable_places,
)
from hora.recipes.nmt.symbols import PAD


class Dl4mtState(NamedTuple):
    """Where the hypotheses stand.

    Attributes:
        hidden: `[sentences, beam, d_model]`.
        values: of the source, `[sentences, s, 2 * d_model]`.
        keys: what attention compares with, `[sentences, s, d_model]`.
        readable: `[sentences, s]`, bool.
    """

    hidden: Tensor
    values: Tensor
    keys: Tensor
    readable: Tensor


class Dl4mt(TranslationModel):
    """Bidirectional GRU encoder, conditional GRU decoder."""

    def __init__(self, config: ModelConfig, source_size: int, target_size: int) -> None:
        super().__init__(config, source_size, target_size)
        narrow, width = config.d_word_vec, config.d_model
        self.source = nn.Embedding(source_size, narrow, padding_idx=PAD)
        self.target = nn.Embedding(target_size, narrow, padding_idx=PAD)
        self.forwards, self.backwards = nn.GRU(narrow, width, batch_first=True), nn.GRU(narrow, width, batch_first=True)
        self.bridge = nn.Linear(2 * width, width) if config.bridge_type == "mlp" else None
        self.attention = AdditiveAttention(width, 2 * width)
        self.read_symbol, self.read_source = nn.GRUCell(narrow, width), nn.GRUCell(2 * width, width)
        self.to_readout = nn.Linear(width + narrow + 2 * width, narrow)
        self.generator = nn.Linear(narrow, target_size)
        self.dropout = nn.Dropout(config.dropout)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """See `TranslationModel`."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.zero_()
            elif "weight_hh" in name:
                for gate in parameter.chunk(3):
                    nn.init.orthogonal_(gate, generator=generator)
            else:
                draw_matrix(parameter, generator, parts=3 if "weight_ih" in name else 1)
        draw_embedding(self.source, generator)
        draw_embedding(self.target, generator)

    def encode(self, source: Tensor) -> Memory:
        """See `TranslationModel`."""
        readable = readable_places(source)
        embedded = self.dropout(self.source(source))
        # Lengths stay on the device: each row is turned around up to its own end, so that padding comes last for both directions.
        length = readable.sum(1, keepdim=True)
        places = torch.arange(source.size(1), device=source.device)[None]
        turned = torch.where(places < length, length - 1 - places, places)[:, :, None]
        with _unwarned(embedded):
            ahead, _ = self.forwards(embedded)
            back, _ = self.backwards(embedded.gather(1, turned.expand_as(embedded)))
        values = torch.cat([ahead, back.gather(1, turned.expand_as(back))], dim=2)
        return Memory(self.dropout(values), readable)

    def decode(self, memory: Memory, target_in: Tensor) -> Tensor:
        """See `TranslationModel`."""
        state = self.begin(memory, 1, target_in.size(1))
        embedded = self.dropout(self.target(target_in))
        hidden, found = state.hidden, []
        for symbol in embedded.unbind(1):
            hidden, context = self._advance(symbol[:, None], hidden, state)
            found.append(torch.cat([hidden, context], dim=2))
        logits: Tensor = self.generator(self._read_out(torch.cat(found, dim=1), embedded))
        return logits

    def begin(self, memory: Memory, beam_size: int, capacity: int) -> Dl4mtState:
        """See `TranslationModel`."""
        del capacity
        readable = memory.readable
        share = readable[:, :, None] / readable.sum(1)[:, None, None]
        mean = (memory.values * share).sum(1).to(memory.values.dtype)
        hidden = mean.new_zeros(len(mean), self.attention.width) if self.bridge is None else torch.tanh(self.bridge(mean))
        return Dl4mtState(hidden[:, None].repeat(1, beam_size, 1), memory.values, self.attention.to_key(memory.values), readable)

    def step(self, symbols: Tensor, position: Tensor, state: Dl4mtState) -> Tensor:
        """See `TranslationModel`."""
        del position
        embedded = self.target(symbols)
        hidden, context = self._advance(embedded, state.hidden, state)
        state.hidden.copy_(hidden)
        return self._read_out(torch.cat([hidden, context], dim=2), embedded)

    def project(self, values: Tensor) -> Tensor:
        """See `TranslationModel`."""
        return project_unrounded(values, self.generator)

    def reorder(self, state: Dl4mtState, parents: Tensor) -> None:
        """See `TranslationModel`."""
        state.hidden.copy_(state.hidden.gather(1, parents[:, :, None].expand_as(state.hidden)))

    def _advance(self, embedded: Tensor, hidden: Tensor, state: Dl4mtState) -> tuple[Tensor, Tensor]:
        """One symbol of each hypothesis, `[sentences, beam, d_word_vec]`: the new `hidden` and what was found in the source."""
        shape = hidden.shape
        asking = self.read_symbol(embedded.flatten(0, 1), hidden.flatten(0, 1))
        context = self.attention(asking.view(shape), state)
        return self.read_source(context.flatten(0, 1), asking).view(shape), context

    def _read_out(self, found: Tensor, embedded: Tensor) -> Tensor:
        values: Tensor = self.dropout(torch.tanh(self.to_readout(torch.cat([found, embedded], dim=2))))
        return values


def _unwarned(values: Tensor) -> AbstractContextManager[Any]:
    """PyTorch lays weights out for cuDNN in all types but bfloat16, and then warns that they are not."""
    if values.dtype != torch.bfloat16 or torch.is_grad_enabled():
        return nullcontext()
    return warnings.catch_warnings(action="ignore", category=UserWarning)


class AdditiveAttention(nn.Module):
    """Attention whose scores a small network gives."""

    def __init__(self, width: int, source_width: int) -> None:
        super().__init__()
        self.width = width
        self.to_query, self.to_key = nn.Linear(width, width), nn.Linear(source_width, width, bias=False)
        self.to_score = nn.Linear(width, 1, bias=False)

    def forward(self, asking: Tensor, state: Dl4mtState) -> Tensor:
        """What `asking` `[sentences, beam, width]` find in the source, `[sentences, beam, source_width]`."""
        compared = torch.tanh(state.keys[:, None] + self.to_query(asking)[:, :, None])
        scores = self.to_score(compared).squeeze(3).masked_fill(~state.readable[:, None], -math.inf)
        weights = F.softmax(scores, dim=2, dtype=torch.promote_types(scores.dtype, torch.float32))  # float32 at least
        found: Tensor = weights.to(state.values.dtype) @ state.values
        return found
