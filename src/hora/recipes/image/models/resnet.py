"""Residual networks (He and others, arXiv:1512.03385): those of 6n + 2 layers for small images, and 18, 34 and 50 layers; ResNeXt.

For images up to 64 x 64 those of 18, 34 and 50 layers begin with a convolution of 3 x 3 instead of one of 7 x 7 and a pooling, as is usual for CIFAR.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

LAYERS: Final = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
_LARGEST_SMALL_IMAGE: Final = 64


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, groups=groups, bias=False)


class PaddedShortcut(nn.Module):
    """A shortcut without parameters: every `stride`-th pixel, and channels of zeros ("option A" of the paper)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self._stride, self._extra = stride, outputs - inputs

    def forward(self, values: Tensor) -> Tensor:
        """`[batch, inputs, height, width]` to `[batch, outputs, height / stride, width / stride]`."""
        return F.pad(values[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, 0, self._extra))


class Block(nn.Module):
    """Two convolutions of 3 x 3, or with `bottleneck` 1 x 1, 3 x 3 (in `groups`) and 1 x 1, and a shortcut around them."""

    def __init__(self, inputs: int, stage: "Stage", stride: int, *, bottleneck: bool, padded: bool, groups: int) -> None:
        super().__init__()
        width, outputs = stage.width, stage.outputs
        plan = (
            [(1, width, 1, 1), (3, width, stride, groups), (1, outputs, 1, 1)]
            if bottleneck
            else [(3, width, stride, 1), (3, outputs, 1, 1)]
        )
        layers: list[nn.Module] = []
        channels = inputs
        for size, number, step, parts in plan:
            layers += [nn.ReLU()] if layers else []
            layers += [_conv(channels, number, size, step, parts), nn.BatchNorm2d(number)]
            channels = number
        self.layers = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
            self.shortcut = PaddedShortcut(inputs, outputs, stride) if padded else projection

    def forward(self, values: Tensor) -> Tensor:
        """`[batch, inputs, height, width]` to `[batch, outputs, height / stride, width / stride]`."""
        return F.relu(self.layers(values) + self.shortcut(values))


class Stage(NamedTuple):
    """Blocks of one size: channels within them and at their end, and how many blocks."""

    width: int
    outputs: int
    num_blocks: int


class ResNet(nn.Module):
    """A stem, stages of blocks of which each but the first halves the image, an average over what is left, and a linear layer."""

    def __init__(
        self,
        stem: nn.Module,
        channels: int,
        stages: Sequence[Stage],
        num_classes: int,
        *,
        bottleneck: bool,
        padded: bool = False,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.stem = stem
        blocks: list[nn.Module] = []
        for number, stage in enumerate(stages):
            for place in range(stage.num_blocks):
                stride = 2 if number and not place else 1
                blocks.append(Block(channels, stage, stride, bottleneck=bottleneck, padded=padded, groups=groups))
                channels = stage.outputs
        self.blocks = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, num_classes]`."""
        return self.classifier(self.blocks(self.stem(images)).flatten(1))  # type: ignore[no-any-return]


def _stages(widths: Sequence[int], counts: Sequence[int], *, bottleneck: bool) -> list[Stage]:
    return [Stage(width, 4 * width if bottleneck else width, count) for width, count in zip(widths, counts, strict=True)]


def _small_stem(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(_conv(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU())


def small_resnet(num_blocks: int, channels: int, num_classes: int, *, bottleneck: bool) -> ResNet:
    """Three stages of `num_blocks` blocks with 16, 32 and 64 channels: 6n + 2 layers, or 9n + 2 with bottlenecks; shortcuts without parameters."""
    stages = _stages((16, 32, 64), [num_blocks] * 3, bottleneck=bottleneck)
    return ResNet(_small_stem(channels, 16), 16, stages, num_classes, bottleneck=bottleneck, padded=True)


def large_resnet(depth: int, channels: int, size: int, num_classes: int) -> ResNet:
    """Of 18, 34 or 50 layers, with projections as shortcuts."""
    stem = _small_stem(channels, 64)
    if size > _LARGEST_SMALL_IMAGE:
        stem = nn.Sequential(_conv(channels, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    stages = _stages((64, 128, 256, 512), LAYERS[depth], bottleneck=depth == 50)
    return ResNet(stem, 64, stages, num_classes, bottleneck=depth == 50)


def resnext(num_blocks: int, cardinality: int, channels: int, num_classes: int) -> ResNet:
    """9n + 2 layers whose blocks have `cardinality` groups of 64, 128 and 256 channels (Xie and others, arXiv:1611.05431)."""
    stages = [Stage(64 * scale * cardinality, 256 * scale, num_blocks) for scale in (1, 2, 4)]
    return ResNet(_small_stem(channels, 64), 64, stages, num_classes, bottleneck=True, groups=cardinality)
