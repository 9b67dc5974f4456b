"""The models that are trained, each with the batch of one rank, which is the same whatever the number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hora.diag.steps.request import ADAMW
from hora.diag.steps.translation import PAD, DecoderLayer, EncoderLayer, Translator, sentences

Batch = tuple[Tensor, ...]
"""What the model is given, and last the classes that it should find."""


@dataclass(frozen=True)
class Job:
    """A model, its batches, and its optimizer. The loss is the cross entropy over `classes`.

    Attributes:
        model: makes it.
        batch: draws one; all have as many targets that count.
        classes: how many there are.
        optimizer: makes it of parameters.
        items: what a step's work is counted in.
        bfloat16: whether it computes under autocast.
        units: the parts that FSDP gathers one after the other.
        padding: the target that does not count.
        smoothing: of labels.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    classes: int
    optimizer: Callable[..., torch.optim.Optimizer]
    items: str = "tokens"
    bfloat16: bool = False
    units: tuple[type[nn.Module], ...] = ()
    padding: int = -100
    smoothing: float = 0.0

    def batch_of(self, rank: int, device: torch.device) -> Batch:
        """The batch of a rank."""
        torch.manual_seed(1 + rank)
        return tuple(tensor.to(device) for tensor in self.batch())

    def weight(self, batch: Batch) -> int:
        """How many targets count."""
        return int((batch[-1] != self.padding).sum())

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of all targets that count."""
        *inputs, targets = batch
        with torch.autocast(targets.device.type, torch.bfloat16, enabled=self.bfloat16):
            outputs = model(*inputs).view(-1, self.classes)
        return F.cross_entropy(
            outputs.float(), targets.view(-1), reduction="sum", ignore_index=self.padding, label_smoothing=self.smoothing
        )


_SGD = partial(torch.optim.SGD, lr=0.1)
_ADAMW = partial(torch.optim.AdamW, lr=1e-4)


def make(name: str, *, tiny: bool) -> Job:
    """The workload `name` (`request.WORKLOADS`)."""
    if name.endswith(ADAMW):
        return replace(make(name.removesuffix(ADAMW), tiny=tiny), optimizer=_ADAMW)
    if name.startswith("lstm"):
        return (
            _lstm(16, 50, 5)
            if tiny
            else _lstm({"lstm_small": 200, "lstm_large": 1500}[name], 10_000, {"lstm_small": 20, "lstm_large": 35}[name])
        )
    if name.startswith("gpt2"):
        samples = int(name.removeprefix("gpt2_"))
        return _gpt2(samples, 50, 16, (16, 2, 2)) if tiny else _gpt2(samples, 50_257, 1024, (768, 12, 12))
    if name == "transformer_nmt":
        return _translation(50, (16, 2, 1), (8, 3, 9)) if tiny else _translation(32_000, (512, 8, 6), (128, 16, 48))
    if name == "resnet50":
        # So narrow and with so few images its gradients would be nothing but the rounding of bfloat16.
        return replace(_images(4, 8, 32), bfloat16=False) if tiny else _images(64, 64, 224)
    return _perceptron(16, 4) if tiny else _perceptron(1024, 64)


def _lstm(width: int, words: int, window: int) -> Job:
    tokens = partial(torch.randint, words, (window, 20))
    return Job(lambda: _Lstm(width, words), lambda: (tokens(), tokens()), words, _SGD, units=(nn.LSTM,))


def _gpt2(samples: int, words: int, window: int, size: tuple[int, int, int]) -> Job:
    tokens = partial(torch.randint, words, (samples, window))
    return Job(lambda: Gpt(words, window, *size), lambda: (tokens(), tokens()), words, _ADAMW, bfloat16=True, units=(_Block,))


def _translation(words: int, size: tuple[int, int, int], shape: tuple[int, int, int]) -> Job:
    return Job(
        lambda: Translator(words, *size),
        lambda: sentences(words, *shape),
        words,
        _ADAMW,
        bfloat16=True,
        units=(EncoderLayer, DecoderLayer),
        padding=PAD,
        smoothing=0.1,
    )


def _images(width: int, samples: int, side: int) -> Job:
    return Job(
        lambda: _resnet50(width),
        lambda: (torch.randn(samples, 3, side, side).to(memory_format=torch.channels_last), torch.randint(1000, (samples,))),
        1000,
        partial(_SGD, lr=0.01, momentum=0.9),
        items="images",
        bfloat16=True,
        units=(_Bottleneck,),
    )


def _perceptron(width: int, samples: int) -> Job:
    return Job(
        lambda: nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 1000)),
        lambda: (torch.randn(samples, width), torch.randint(1000, (samples,))),
        1000,
        _SGD,
        items="samples",
        units=(nn.Linear,),
    )


def _resnet50(width: int) -> nn.Module:
    model: Any = _ResNet50(width)  # torch's annotations leave out memory_format
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
        logits: Tensor = self.out(self.lstm(self.table(words))[0].flatten(0, 1))
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
    """ResNet-50, of `width` 64, with its strides in the middle convolutions (He et al., arXiv:1512.03385)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        blocks: list[nn.Module] = []
        inside = width
        for stage, depth in enumerate((3, 4, 6, 3)):
            for index in range(depth):
                blocks.append(_Bottleneck(inside, width << stage, 2 if stage > 0 and index == 0 else 1))
                inside = 4 * width << stage
        self.layers = nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits
