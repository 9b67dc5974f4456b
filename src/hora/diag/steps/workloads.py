"""What is trained: a model, its optimizer, and the batch of one rank, which is the same whatever the number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hora.diag.steps.models import Block, Bottleneck, Gpt, Lstm, resnet50
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
    return Job(lambda: Lstm(width, words), lambda: (tokens(), tokens()), words, _SGD, units=(nn.LSTM,))


def _gpt2(samples: int, words: int, window: int, size: tuple[int, int, int]) -> Job:
    tokens = partial(torch.randint, words, (samples, window))
    return Job(lambda: Gpt(words, window, *size), lambda: (tokens(), tokens()), words, _ADAMW, bfloat16=True, units=(Block,))


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
        lambda: resnet50(width),
        lambda: (torch.randn(samples, 3, side, side).to(memory_format=torch.channels_last), torch.randint(1000, (samples,))),
        1000,
        partial(_SGD, lr=0.01, momentum=0.9),
        items="images",
        bfloat16=True,
        units=(Bottleneck,),
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
