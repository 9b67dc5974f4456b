"""The configurations that have a name."""

from dataclasses import replace
from typing import Final

from hora.recipes.image.config import DataConfig, ImageConfig, ModelConfig, OptimizerConfig, ScheduleConfig

# Without the warm-up the loss rises at first, and with it the difference that another order of summation makes.
_mnist = ImageConfig(
    epochs=5,
    data=DataConfig(path="mnist"),
    optimizer=OptimizerConfig(lr=0.02, base_batch_size=100),
    schedule=ScheduleConfig(kind="cosine", warmup_epochs=0.5),
)

# What the CIFAR scripts of torch_dist_lab train by default, but for the number of epochs, for which its launcher has these milestones.
_cifar = ImageConfig(
    epochs=164,
    model=ModelConfig(arch="alexnet"),
    data=DataConfig(path="cifar10", global_batch_size=128, crop_padding=4, flip=True),
    optimizer=OptimizerConfig(lr=0.1, base_batch_size=128, weight_decay=5e-4),
    schedule=ScheduleConfig(milestones=(81, 122)),
)

# As published: arXiv:1512.03385, section 4.2.
_resnet = replace(_cifar, model=ModelConfig(arch="resnet20"), optimizer=replace(_cifar.optimizer, weight_decay=1e-4))

NAMED: Final[dict[str, ImageConfig]] = {
    "digits": ImageConfig(
        epochs=10,
        data=DataConfig(path="digits", global_batch_size=64, crop_padding=1),
        optimizer=OptimizerConfig(lr=0.05, base_batch_size=64),
        schedule=ScheduleConfig(kind="cosine"),
    ),
    "mnist": _mnist,
    "fashion-mnist": replace(_mnist, epochs=10, data=replace(_mnist.data, path="fashion-mnist")),
    "cifar10": _cifar,
    "cifar100": replace(_cifar, data=replace(_cifar.data, path="cifar100")),
    "cifar10-resnet20": _resnet,
    # At the full rate it does not begin to learn; the paper goes up to it in 400 steps, which is about one epoch.
    "cifar10-resnet110": replace(_resnet, model=ModelConfig(arch="resnet110"), schedule=replace(_resnet.schedule, warmup_epochs=1.0)),
    "cifar10-vgg19": replace(_cifar, model=ModelConfig(arch="vgg19-bn")),
    # As published: arXiv:1605.07146.
    "cifar10-wrn28-10": replace(
        _cifar,
        epochs=200,
        model=ModelConfig(arch="wide-resnet", depth=28, widen_factor=10),
        optimizer=replace(_cifar.optimizer, nesterov=True),
        schedule=ScheduleConfig(milestones=(60, 120, 160), gamma=0.2),
    ),
    # As published: arXiv:1608.06993.
    "cifar10-densenet": replace(
        _cifar,
        epochs=300,
        model=ModelConfig(arch="densenet", depth=100, growth_rate=12),
        data=replace(_cifar.data, global_batch_size=64),
        optimizer=OptimizerConfig(lr=0.1, base_batch_size=64, nesterov=True, weight_decay=1e-4),
        schedule=ScheduleConfig(milestones=(150, 225)),
    ),
    # As PyTorch's ImageNet example trains it; `data.path` must be given.
    "imagenet-resnet50": ImageConfig(
        epochs=90,
        model=ModelConfig(arch="resnet50"),
        data=DataConfig(path="imagenet", global_batch_size=256, flip=True, num_workers=4),
        optimizer=OptimizerConfig(lr=0.1, weight_decay=1e-4),
        schedule=ScheduleConfig(milestones=(30, 60)),
        channels_last=True,
    ),
}
"""The configurations that have a name, as `--config NAME` takes them."""

DEFAULT: Final = "digits"
