"""Densely connected networks for small images (Huang and others, arXiv:1608.06993): 6n + 4 layers with bottlenecks (BC), 3n + 4 without."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Layer(nn.Module):
    """Adds `growth_rate` channels to what it is given."""

    def __init__(self, inputs: int, growth_rate: int, dropout: float, *, bottleneck: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if bottleneck:
            layers += [nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, 4 * growth_rate, 1, bias=False)]
            inputs = 4 * growth_rate
        layers += [nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, growth_rate, 3, padding=1, bias=False), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers)

    def forward(self, values: Tensor) -> Tensor:
        return torch.cat((values, self.layers(values)), 1)


class DenseNet(nn.Module):
    """Three stages of `num_layers` layers; between them the channels are divided by `compression` and the image is halved."""

    def __init__(
        self, num_layers: int, growth_rate: int, compression: int, channels: int, num_classes: int, *, bottleneck: bool, dropout: float
    ) -> None:
        super().__init__()
        width = 2 * growth_rate if bottleneck and compression > 1 else 16
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        for stage in range(3):
            for _ in range(num_layers):
                layers.append(_Layer(width, growth_rate, dropout, bottleneck=bottleneck))
                width += growth_rate
            if stage < 2:
                layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // compression, 1, bias=False), nn.AvgPool2d(2)]
                width //= compression
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(width))
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, num_classes]`."""
        return self.classifier(F.adaptive_avg_pool2d(F.relu(self.features(images)), 1).flatten(1))  # type: ignore[no-any-return]
