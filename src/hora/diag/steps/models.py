"""The models that are trained, but for the translation Transformer, which is in `translation`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Lstm(nn.Module):
    """Embedding, LSTM, projection (Zaremba, Sutskever and Vinyals, arXiv:1409.2329)."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2)
        self.out = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        """Logits `[time * samples, words]` of the words to come, from `[time, samples]`."""
        logits: Tensor = self.out(self.lstm(self.table(words))[0].flatten(0, 1))
        return logits


class Block(nn.Module):
    """A layer of GPT-2: attention and a perceptron, each behind a normalisation."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of `[samples, time, width]` the same shape."""
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")), self.dropout, self.training)


class Gpt(nn.Module):
    """GPT-2, with tied embeddings."""

    def __init__(self, words: int, window: int, width: int, heads: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        """Logits `[samples, window, words]` of the words to come."""
        x = self.blocks(self.tokens(words) + self.places.weight[: words.size(1)])
        return F.linear(self.norm(x), self.tokens.weight)


class Bottleneck(nn.Module):
    """Three convolutions and a way around them."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        plain = stride == 1 and inside == outside
        self.around = nn.Identity() if plain else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Of `[samples, inside, height, width]` as many images of 4 * `width` channels, smaller by the stride."""
        return F.relu(self.path(x) + self.around(x))


class ResNet50(nn.Module):
    """ResNet-50, of `width` 64, with its strides in the middle convolutions (He et al., arXiv:1512.03385)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        blocks: list[nn.Module] = []
        inside = width
        for stage, depth in enumerate((3, 4, 6, 3)):
            for index in range(depth):
                blocks.append(Bottleneck(inside, width << stage, 2 if stage > 0 and index == 0 else 1))
                inside = 4 * width << stage
        self.layers = nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[samples, 1000]`, from `[samples, 3, height, width]`."""
        logits: Tensor = self.layers(images)
        return logits


def resnet50(width: int) -> nn.Module:
    """ResNet-50 in the memory layout that tensor cores like."""
    model: Any = ResNet50(width)  # torch's annotations leave out memory_format
    channels_last: nn.Module = model.to(memory_format=torch.channels_last)
    return channels_last
