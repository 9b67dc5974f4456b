"""Networks of a few layers: a ConvNet, LeNet-5, and AlexNet for images of 32 x 32."""

import torch.nn.functional as F
from torch import Tensor, nn

from hora.errors import ConfigError


class ConvNet(nn.Module):
    """Two blocks of convolution 5 x 5, BatchNorm, ReLU and pooling, and one linear layer; for square images `[batch, channels, size, size]`."""

    def __init__(self, channels: int, size: int, num_classes: int) -> None:
        super().__init__()
        _require_size("convnet", size, 4)
        self.blocks = nn.Sequential(*_conv_block(channels, 16), *_conv_block(16, 32))
        self.classifier = nn.Linear(32 * (size // 4) ** 2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, num_classes]`."""
        return self.classifier(self.blocks(images).flatten(1))  # type: ignore[no-any-return]


def _conv_block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling (LeCun and others, *Gradient-based learning applied to document recognition*, 1998).

    Images of 28 x 28 are padded to 32 x 32.
    """

    def __init__(self, channels: int, size: int, num_classes: int) -> None:
        super().__init__()
        _require_size("lenet", size, 16)
        padding = 2 if size == 28 else 0
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5)
        rest = ((size + 2 * padding - 4) // 2 - 4) // 2
        self.linear1 = nn.Linear(16 * rest**2, 120)
        self.linear2 = nn.Linear(120, 84)
        self.linear3 = nn.Linear(84, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, num_classes]`."""
        values = F.max_pool2d(F.relu(self.conv1(images)), 2)
        values = F.max_pool2d(F.relu(self.conv2(values)), 2)
        values = F.relu(self.linear1(values.flatten(1)))
        return self.linear3(F.relu(self.linear2(values)))  # type: ignore[no-any-return]


class AlexNet(nn.Module):
    """AlexNet as it is cut for images of 32 x 32: five convolutions and one linear layer (Krizhevsky, Sutskever and Hinton, 2012)."""

    def __init__(self, channels: int, size: int, num_classes: int) -> None:
        super().__init__()
        _require_size("alexnet", size, 21)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, 11, stride=4, padding=5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.classifier = nn.Linear(256, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[batch, num_classes]`."""
        return self.classifier(self.features(images).flatten(1))  # type: ignore[no-any-return]


def _require_size(name: str, size: int, least: int) -> None:
    if size < least:
        raise ConfigError(f"{name} needs images of at least {least} x {least}, but they are {size} x {size}; choose another model.arch")
