"""VGG for images of 32 x 32: the published convolutions and one linear layer (Simonyan and Zisserman, arXiv:1409.1556)."""

from typing import Final

from torch import Tensor, nn

from hora.errors import ConfigError

CONVOLUTIONS: Final = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions of each of the five stages, by depth."""
WIDTHS: Final = (64, 128, 256, 512, 512)


class Vgg(nn.Module):
    """Stages of convolutions 3 x 3, each with a pooling at its end; what is left is averaged."""

    def __init__(self, depth: int, channels: int, size: int, num_classes: int, *, batch_norm: bool) -> None:
        super().__init__()
        if size < 2 ** len(WIDTHS):
            raise ConfigError(f"vgg halves images {len(WIDTHS)} times, so they must be at least 32 x 32, but are {size} x {size}")
        layers: list[nn.Module] = []
        for width, count in zip(WIDTHS, CONVOLUTIONS[depth], strict=True):
            for _ in range(count):
                layers.append(nn.Conv2d(channels, width, 3, padding=1))
                layers += [nn.BatchNorm2d(width)] if batch_norm else []
                layers.append(nn.ReLU())
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, num_classes]`."""
        return self.classifier(self.features(images).flatten(1))  # type: ignore[no-any-return]
