"""The models that are trained, each with the batch of one rank, which is the same whatever the number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Job:
    """A model, its batch, and its optimizer. The loss is the cross entropy over `classes`."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]
    classes: int
    optimizer: Callable[..., torch.optim.Optimizer]
    bfloat16: bool = False

    def loss_sum(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of all samples."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.bfloat16):
            outputs = model(inputs).view(-1, self.classes)
        return F.cross_entropy(outputs.float(), targets.view(-1), reduction="sum")


def make(name: str, *, tiny: bool) -> Job:
    """The workload `name` (`request.WORKLOADS`)."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    if name in ("lstm_small", "lstm_large"):
        width, window = (16, 5) if tiny else {"lstm_small": (200, 20), "lstm_large": (1500, 35)}[name]
        words = 50 if tiny else 10_000
        tokens = partial(torch.randint, words, (window, 20))
        return Job(lambda: _Lstm(width, words), tokens, tokens, words, sgd)
    if name in ("gpt2_1", "gpt2_8"):
        words, window = (50, 16) if tiny else (50_257, 1024)
        tokens = partial(torch.randint, words, (1 if name == "gpt2_1" else 8, window))
        adamw = partial(torch.optim.AdamW, lr=1e-4)
        return Job(lambda: Gpt(words, window, *((16, 2, 2) if tiny else (768, 12, 12))), tokens, tokens, words, adamw, bfloat16=True)
    if name == "resnet50":
        images = partial(torch.randn, 2 if tiny else 64, 3, *((32, 32) if tiny else (224, 224)))
        labels = partial(torch.randint, 1000, (2 if tiny else 64,))
        return Job(
            _resnet50,
            lambda: images().to(memory_format=torch.channels_last),
            labels,
            1000,
            partial(sgd, momentum=0.9),
            bfloat16=True,
        )
    width, samples = (16, 4) if tiny else (1024, 64)
    return Job(
        lambda: nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 1000)),
        partial(torch.randn, samples, width),
        partial(torch.randint, 1000, (samples,)),
        1000,
        sgd,
    )


def _resnet50() -> nn.Module:
    model: Any = _ResNet50()  # torch's annotations leave out memory_format
    channels_last: nn.Module = model.to(memory_format=torch.channels_last)
    return channels_last


class _Lstm(nn.Module):
    """Embedding, LSTM, projection (Zaremba, Sutskever and Vinyals, arXiv:1409.2329)."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2)
        self.out = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(self.table(words))[0])
        return logits


class _Block(nn.Module):
    """A layer of GPT-2: attention and a perceptron, each behind a normalisation."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
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
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        """Logits `[samples, window, words]` of the words to come."""
        x = self.blocks(self.tokens(words) + self.places.weight[: words.size(1)])
        return F.linear(self.norm(x), self.tokens.weight)


class _Bottleneck(nn.Module):
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
        return F.relu(self.path(x) + self.around(x))


class _ResNet50(nn.Module):
    """ResNet-50 with its strides in the middle convolutions (He et al., arXiv:1512.03385)."""

    def __init__(self) -> None:
        super().__init__()
        first = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        blocks: list[nn.Module] = []
        inside = 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            width = 64 << stage
            for index in range(depth):
                blocks.append(_Bottleneck(inside, width, 2 if stage > 0 and index == 0 else 1))
                inside = 4 * width
        self.layers = nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits
