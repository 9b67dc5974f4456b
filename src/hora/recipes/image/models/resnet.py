"""Residual networks (He and others, arXiv:1512.03385): those of 6n + 2 layers for small images, and 18, 34 and 50 layers.

For images up to 64 x 64 the latter begin with a convolution of 3 x 3 instead of one of 7 x 7 and a pooling, as is usual for CIFAR.
"""

from collections.abc import Sequence
from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

LAYERS: Final = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
_LARGEST_SMALL_IMAGE: Final = 64


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class PaddedShortcut(nn.Module):
    """A shortcut without parameters: every `stride`-th pixel, and channels of zeros ("option A" of the paper)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self._stride, self._extra = stride, outputs - inputs

    def forward(self, values: Tensor) -> Tensor:
        """`[batch, inputs, height, width]` to `[batch, outputs, height / stride, width / stride]`."""
        return F.pad(values[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, 0, self._extra))


class Block(nn.Module):
    """Two convolutions of 3 x 3, or with `bottleneck` 1 x 1, 3 x 3 and 1 x 1 with four times the channels, and a shortcut around them."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool, padded: bool = False) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        plan = [(1, width, 1), (3, width, stride), (1, outputs, 1)] if bottleneck else [(3, width, stride), (3, outputs, 1)]
        layers: list[nn.Module] = []
        channels = inputs
        for size, number, step in plan:
            layers += [nn.ReLU()] if layers else []
            layers += [_conv(channels, number, size, step), nn.BatchNorm2d(number)]
            channels = number
        self.layers = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
            self.shortcut = PaddedShortcut(inputs, outputs, stride) if padded else projection

    def forward(self, values: Tensor) -> Tensor:
        """`[batch, inputs, height, width]` to `[batch, outputs, height / stride, width / stride]`."""
        return F.relu(self.layers(values) + self.shortcut(values))


class ResNet(nn.Module):
    """A stem, stages of blocks of which each but the first halves the image, an average over what is left, and a linear layer."""

    def __init__(
        self, stem: nn.Module, width: int, widths: Sequence[int], counts: Sequence[int], num_classes: int, *, bottleneck: bool, padded: bool
    ) -> None:
        super().__init__()
        self.stem = stem
        blocks: list[nn.Module] = []
        channels = width
        for stage, (stage_width, count) in enumerate(zip(widths, counts, strict=True)):
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(Block(channels, stage_width, stride, bottleneck=bottleneck, padded=padded))
                channels = 4 * stage_width if bottleneck else stage_width
        self.blocks = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, num_classes]`."""
        return self.classifier(self.blocks(self.stem(images)).flatten(1))  # type: ignore[no-any-return]


def small_resnet(num_blocks: int, channels: int, num_classes: int, *, bottleneck: bool) -> ResNet:
    """Three stages of `num_blocks` blocks with 16, 32 and 64 channels: 6n + 2 layers, or 9n + 2 with bottlenecks; shortcuts without parameters."""
    stem = nn.Sequential(_conv(channels, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    return ResNet(stem, 16, (16, 32, 64), [num_blocks] * 3, num_classes, bottleneck=bottleneck, padded=True)


def large_resnet(depth: int, channels: int, size: int, num_classes: int) -> ResNet:
    """Of 18, 34 or 50 layers, with projections as shortcuts."""
    large = size > _LARGEST_SMALL_IMAGE
    layers: list[nn.Module] = [_conv(channels, 64, 7, 2) if large else _conv(channels, 64, 3), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.MaxPool2d(3, stride=2, padding=1)] if large else []
    stem = nn.Sequential(*layers)
    return ResNet(stem, 64, (64, 128, 256, 512), LAYERS[depth], num_classes, bottleneck=depth == 50, padded=False)
