"""Networks that tell classes of images, by name; weights are drawn from the seed alone."""

import math
from typing import Any

from torch import nn

from hora.comm.randomness import lent_generators, seed_generators
from hora.errors import ConfigError
from hora.plan.seeds import derive_key
from hora.recipes.image.architectures import FAMILIES, IMAGENET_RESNETS, TIMM, canonical_arch
from hora.recipes.image.config import ModelConfig
from hora.recipes.image.models.densenet import DenseNet
from hora.recipes.image.models.resnet import large_resnet, resnext, small_resnet
from hora.recipes.image.models.small import AlexNet, ConvNet, LeNet
from hora.recipes.image.models.vgg import Vgg
from hora.recipes.image.models.wide_resnet import WideResNet


def build_model(config: ModelConfig, *, channels: int, size: int, num_classes: int, seed: int) -> nn.Module:
    """Makes the network that `config` describes, on the CPU in float32, for images `[batch, channels, size, size]`.

    Its output are logits `[batch, num_classes]`. Weights are drawn from `seed`; the generators of the caller stay as they are.

    Raises:
        ConfigError: it takes no images of this size, or timm has no such network or is not installed.
    """
    with lent_generators():
        seed_generators(derive_key("image model", seed))
        model = _make(config, channels, size, num_classes)
        if not config.arch.startswith(TIMM):
            initialize(model)
    return model


def _make(config: ModelConfig, channels: int, size: int, num_classes: int) -> nn.Module:
    arch, depth = canonical_arch(config.arch)
    if arch.startswith(TIMM):
        return _from_timm(arch.removeprefix(TIMM), channels, num_classes)
    if arch in FAMILIES:
        return _of_depth(config, arch, config.depth or depth or FAMILIES[arch].default, channels, num_classes)
    if arch.startswith("vgg"):
        return Vgg(int(arch[3:5]), channels, size, num_classes, batch_norm=arch.endswith("-bn"))
    if arch in IMAGENET_RESNETS:
        return large_resnet(int(arch.removeprefix("resnet")), channels, size, num_classes)
    return {"convnet": ConvNet, "lenet": LeNet, "alexnet": AlexNet}[arch](channels, size, num_classes)


def _of_depth(config: ModelConfig, arch: str, depth: int, channels: int, num_classes: int) -> nn.Module:
    blocks = FAMILIES[arch].blocks(depth, bottleneck=config.has_bottlenecks)
    if arch == "resnet":
        return small_resnet(blocks, channels, num_classes, bottleneck=config.has_bottlenecks)
    if arch == "resnext":
        return resnext(blocks, config.cardinality, channels, num_classes)
    if arch == "preresnet":  # whose layers are counted without the shortcuts
        return WideResNet(blocks, 1, channels, num_classes, dropout=0.0)
    if arch == "wide-resnet":
        return WideResNet(blocks, config.widen_factor, channels, num_classes, dropout=config.dropout)
    return DenseNet(
        blocks, config.growth_rate, config.compression, channels, num_classes, bottleneck=config.has_bottlenecks, dropout=config.dropout
    )


def _from_timm(name: str, channels: int, num_classes: int) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise ConfigError(
            f"{TIMM}{name} is a network of timm, which is not installed; pip install timm, or choose another model.arch"
        ) from error
    if not timm.is_model(name):
        raise ConfigError(f"timm {timm.__version__} has no network {name!r}; see timm.list_models()")
    made: Any = timm.create_model(name, pretrained=False, in_chans=channels, num_classes=num_classes)
    return made  # type: ignore[no-any-return]


def initialize(model: nn.Module) -> None:
    """Draws the weights of convolutions from a normal distribution that keeps the variance of what goes backward (arXiv:1502.01852)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
            nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
