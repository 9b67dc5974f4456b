"""Wide residual networks (Zagoruyko and Komodakis, arXiv:1605.07146): 6n + 4 layers, `widen_factor` times the channels, activation first.

With `widen_factor` 1 and no dropout they are the residual networks with preactivation (He and others, arXiv:1603.05027).
"""

import torch.nn.functional as F
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        active = F.relu(self.norm1(values))
        residual = self.conv2(self.dropout(F.relu(self.norm2(self.conv1(active)))))
        # Where the shape changes the shortcut is of what has been normalised, as published.
        return (values if self.shortcut is None else self.shortcut(active)) + residual  # type: ignore[no-any-return]


class WideResNet(nn.Module):
    """Three stages of `num_blocks` blocks with 16, 32 and 64 times `widen_factor` channels."""

    def __init__(self, num_blocks: int, widen_factor: int, channels: int, num_classes: int, *, dropout: float) -> None:
        super().__init__()
        widths = [16, *(width * widen_factor for width in (16, 32, 64))]
        blocks = [
            _Block(widths[stage] if number == 0 else widths[stage + 1], widths[stage + 1], 2 if stage and not number else 1, dropout)
            for stage in range(3)
            for number in range(num_blocks)
        ]
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False), *blocks, nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, num_classes]`."""
        return self.classifier(self.features(images).flatten(1))  # type: ignore[no-any-return]
