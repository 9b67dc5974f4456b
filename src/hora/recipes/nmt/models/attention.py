"""Attention with several heads, on PyTorch's fused kernels: over whole sequences, and over a cache that a beam of hypotheses shares.

While decoding, the hypotheses of a sentence are the queries of *one* attention. Its keys are those that any of them has written, and a mask says
which of these are each one's own past. So reordering hypotheses moves no keys, and what comes from the source is stored once a sentence.
"""

import math
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hora.recipes.nmt.models.base import draw_matrix

_SHORT: Final = 16
"""Up to so many keys two products and a softmax are faster than any fused kernel. Forward and backward with dropout on an H200, 12,000 tokens of 8
heads in bfloat16: 264 us of 12 keys, beside 405 (memory-efficient) and 693 (cuDNN); of 16 keys 254, 312, 539; of 24 keys 246, 229, 383."""

_PREFERRED: Final = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
"""PyTorch would take cuDNN's kernel, which is made for longer sequences: 261 us of 40 keys, beside 172."""


class Cache(NamedTuple):
    """What the hypotheses of each sentence have written so far, and where they write next.

    Attributes:
        keys: `[sentences, heads, capacity * beam, head_width]`.
        values: likewise.
        places: where the next ones go, `[beam]` int64.
        mask: added to scores, `[sentences, 1, beam, capacity * beam]`: 0 at the past of each hypothesis and at its next place, else minus infinity.
    """

    keys: Tensor
    values: Tensor
    places: Tensor
    mask: Tensor

    def write(self, key: Tensor, value: Tensor) -> None:
        """Puts in the next ones, `[sentences, heads, beam, head_width]` each."""
        self.keys.index_copy_(2, self.places, key)
        self.values.index_copy_(2, self.places, value)


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, head_width: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_width = head_width
        self.dropout = dropout
        self.to_residual = nn.Linear(num_heads * head_width, width)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
        """What the queries `[sentences, heads, time, head_width]` find, as what is added to the stream `[sentences, time, width]`."""
        dropout = self.dropout if self.training else 0.0
        if self.training and key.size(-2) <= _SHORT:
            found = attend_plainly(query, key, value, mask, dropout, is_causal=is_causal)
        else:
            with sdpa_kernel(_PREFERRED, set_priority=True):
                found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)
        added: Tensor = self.to_residual(found.transpose(1, 2).flatten(2))
        return added

    def by_head(self, values: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Takes `[sentences, time, parts * heads * head_width]` apart, each part `[sentences, heads, time, head_width]`."""
        return values.view(*values.shape[:2], parts, self.num_heads, self.head_width).permute(2, 0, 3, 1, 4).unbind()


class SelfAttention(_Attention):
    """Attention of a sequence to itself."""

    def __init__(self, width: int, num_heads: int, head_width: int, dropout: float) -> None:
        super().__init__(width, num_heads, head_width, dropout)
        self.to_heads = nn.Linear(width, 3 * num_heads * head_width)

    def initialize(self, generator: Generator) -> None:
        """Draws the matrices."""
        draw_matrix(self.to_heads.weight, generator, parts=3)
        draw_matrix(self.to_residual.weight, generator)

    def forward(self, values: Tensor, readable: Tensor | None) -> Tensor:
        """Attends to all places that are `readable` `[sentences, 1, 1, time]`; None: to those before and itself.

        Padding on the right is never before a symbol, so that there the kernels without a mask will do.
        """
        query, key, value = self.by_head(self.to_heads(values), 3)
        return self.attend(query, key, value, readable, is_causal=readable is None)

    def step(self, values: Tensor, cache: Cache) -> Tensor:
        """Attends from `[sentences, beam, width]` to the past of each hypothesis and to itself."""
        query, key, value = self.by_head(self.to_heads(values), 3)
        cache.write(key, value)
        return self.attend(query, cache.keys, cache.values, cache.mask)


class SourceAttention(_Attention):
    """Attention to the source."""

    def __init__(self, width: int, num_heads: int, head_width: int, dropout: float) -> None:
        super().__init__(width, num_heads, head_width, dropout)
        self.to_query = nn.Linear(width, num_heads * head_width)
        self.to_key_value = nn.Linear(width, 2 * num_heads * head_width)

    def initialize(self, generator: Generator) -> None:
        """Draws the matrices."""
        draw_matrix(self.to_query.weight, generator)
        draw_matrix(self.to_key_value.weight, generator, parts=2)
        draw_matrix(self.to_residual.weight, generator)

    def read(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a source `[sentences, s, width]`, `[sentences, heads, s, head_width]` each."""
        key, value = self.by_head(self.to_key_value(memory), 2)
        return key, value

    def forward(self, values: Tensor, key: Tensor, value: Tensor, readable: Tensor) -> Tensor:
        """What `values` `[sentences, time, width]` find in what `read` gave, where it is `readable`: `[sentences, 1, 1, s]`."""
        (query,) = self.by_head(self.to_query(values), 1)
        return self.attend(query, key, value, readable)


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, *, is_causal: bool) -> Tensor:
    """What `F.scaled_dot_product_attention` gives for a mask that is bool, from two products and a softmax."""
    scores = (query * query.size(-1) ** -0.5) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return F.dropout(scores.softmax(-1), dropout) @ value
