"""An encoder-decoder Transformer for translation, and padded batches of sentences for it (Vaswani et al., arXiv:1706.03762).

Normalisation stands before each part, as it is trained today. No dropout: variants are compared by their numbers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD = 0


class Translator(nn.Module):
    """Encoder and decoder, with one table of words for both and the output."""

    def __init__(self, words: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, padding_idx=PAD)
        nn.init.normal_(self.table.weight, std=width**-0.5)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads) for _ in range(layers))
        self.norm_encoded, self.norm_decoded = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, source: Tensor, begun: Tensor) -> Tensor:
        """Logits `[sentences, time, words]` of the words that follow `begun`, of translations of `source`; both `[sentences, time]`."""
        readable = (source != PAD)[:, None, None, :]
        encoded = self._embed(source)
        for layer in self.encoder:
            encoded = layer(encoded, readable)
        encoded, decoded = self.norm_encoded(encoded), self._embed(begun)
        for layer in self.decoder:
            decoded = layer(decoded, encoded, readable)
        return F.linear(self.norm_decoded(decoded), self.table.weight)

    def _embed(self, words: Tensor) -> Tensor:
        width = self.table.embedding_dim
        return torch.add(_places(words.size(1), width, words.device), self.table(words), alpha=width**0.5)


class EncoderLayer(nn.Module):
    """Attention to all words of the source, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention, self.perceptron = nn.LayerNorm(width), _Attention(width, heads), _Perceptron(width)

    def forward(self, x: Tensor, readable: Tensor) -> Tensor:
        """`[sentences, time, width]` to as many; `readable` says which words are none of padding."""
        normed = self.norm(x)
        x = x + self.attention(normed, normed, readable)
        return torch.add(x, self.perceptron(x))


class DecoderLayer(nn.Module):
    """Attention to the words before, attention to the source, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_own, self.norm_source = nn.LayerNorm(width), nn.LayerNorm(width)
        self.own, self.source, self.perceptron = _Attention(width, heads), _Attention(width, heads), _Perceptron(width)

    def forward(self, x: Tensor, encoded: Tensor, readable: Tensor) -> Tensor:
        """As that of the encoder, and `encoded` is the source."""
        normed = self.norm_own(x)
        x = x + self.own(normed, normed, None)
        x = x + self.source(self.norm_source(x), encoded, readable)
        return torch.add(x, self.perceptron(x))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, readable: Tensor | None) -> Tensor:
        """What `x` finds in `memory`, as far as it is `readable`; None: in what stands before."""
        query = self._by_head(self.query(x))
        key, value = (self._by_head(part) for part in self.key_value(memory).chunk(2, dim=-1))
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=readable, is_causal=readable is None)
        mixed: Tensor = self.out(found.transpose(1, 2).reshape(x.shape))
        return mixed

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class _Perceptron(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def _places(time: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines of each place, `[time, width]`."""
    rates = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000.0) / width))
    angles = torch.arange(time, device=device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def sentences(words: int, count: int, shortest: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """A source, translations begun, and the words that follow, `[count, time]` each, padded to the longest.

    The lengths are the same in each batch, in one order: each rank has as many words, so that the mean of the ranks' means is that of all words. They
    are spread evenly from `shortest` to `longest`.
    """
    lengths = torch.linspace(shortest, longest, count).round().long()
    source, target = (_padded(words, lengths[order], longest) for order in (torch.arange(count), torch.arange(count).flip(0)))
    begun = F.pad(target[:, :-1], (1, 0), value=1) * (target != PAD)
    return source, begun, target


def _padded(words: int, lengths: Tensor, longest: int) -> Tensor:
    """Words from 2 on: 0 is padding, 1 begins a sentence."""
    drawn = torch.randint(2, words, (len(lengths), longest))
    return drawn.masked_fill(torch.arange(longest) >= lengths[:, None], PAD)
