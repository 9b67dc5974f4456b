"""What an image classification run is made of: one tree of dataclasses. Imports no torch, so that a wrong value is told before a rank is started."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from hora.errors import ConfigError
from hora.recipes.image.architectures import FAMILIES, WITHOUT_CHOICE, canonical_arch
from hora.recipes.settings import Amount, CheckpointConfig, Count, RunConfig


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    `depth` is that of `resnet`, `preresnet`, `resnext`, `wide-resnet` and `densenet`; `bottleneck` of `resnet` (without, unless said otherwise)
    and `densenet` (with). `cardinality` is that of `resnext`, `widen_factor` that of `wide-resnet`, `growth_rate` and `compression` are those of
    `densenet`, `dropout` is of the last two.
    `batch_norm`: over the images of all ranks (`sync`), so that the number of ranks changes nothing, or over those of each rank (`local`), which
    is faster. In exact mode it is over those of each logical rank in any case.
    """

    arch: str = "convnet"
    depth: Count | None = None
    bottleneck: bool | None = None
    cardinality: Count = 8
    widen_factor: Count = 10
    growth_rate: Count = 12
    compression: Count = 2
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    batch_norm: Literal["sync", "local"] = "sync"

    def __post_init__(self) -> None:
        arch, depth = canonical_arch(self.arch)
        if arch not in FAMILIES:
            if self.depth is not None or self.bottleneck is not None:
                raise ConfigError(f"model.depth and model.bottleneck are of {', '.join(FAMILIES)}, but model.arch is {self.arch!r}")
            return
        if depth is not None and self.depth not in (None, depth):
            raise ConfigError(f"model.depth must agree with model.arch, but they are {self.depth} and {self.arch!r}; give one of them")
        if self.bottleneck is not None and arch in WITHOUT_CHOICE:
            raise ConfigError(f"{arch} has {'always' if WITHOUT_CHOICE[arch] else 'no'} bottlenecks; leave model.bottleneck out")
        FAMILIES[arch].blocks(self.depth or depth or FAMILIES[arch].default, bottleneck=self.has_bottlenecks)

    @property
    def has_bottlenecks(self) -> bool:
        """Whether blocks have bottlenecks."""
        return self.bottleneck if self.bottleneck is not None else canonical_arch(self.arch)[0] in ("densenet", "resnext")


@dataclass(frozen=True)
class SyntheticConfig:
    """Images of noise with a pattern for each class, for measuring speed."""

    samples: Count = 2048
    channels: Count = 3
    size: Count = 32
    classes: Annotated[int, Field(ge=2)] = 10


@dataclass(frozen=True)
class DataConfig:
    """The images.

    `path` is `digits`, `synthetic`, a data set by name (`mnist`, `fashion-mnist`, `cifar10`, `cifar100`, looked for where it is usually
    installed), or a directory. A step takes `global_batch_size` images: those of the whole job, whatever the number of ranks.
    `held_out`: so many training images, chosen by the seed, are kept out of training and decide which checkpoint is the best; if none, the
    test images do.
    `crop_padding`: training images are padded by so many black pixels on each side and cropped at random; `flip`: mirrored at random.
    `size`, of folders of image files alone: images are cropped and scaled to this. `num_workers`, likewise: processes of each rank that
    read them.
    """

    path: str = "digits"
    global_batch_size: Count = 100
    micro_batch_size: Count | None = None
    eval_batch_size: Count = 1000
    drop_last: bool = False
    held_out: Annotated[int, Field(ge=0)] = 0
    crop_padding: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    size: Count = 224
    num_workers: Annotated[int, Field(ge=0)] = 0
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    """The update, divided by the number of images of the global batch.

    `lr_rule` says what becomes of `lr` when `data.global_batch_size` is not `base_batch_size`: nothing (`none`), times their quotient
    (`linear`), or times its root (`sqrt`). The number of ranks never changes it.
    """

    kind: Literal["sgd", "adamw"] = "sgd"
    lr: Amount = 0.1
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    base_batch_size: Count = 256
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_norm: Amount | None = None

    def __post_init__(self) -> None:
        if self.nesterov and (self.kind != "sgd" or not self.momentum):
            raise ConfigError("optimizer.nesterov is a way of sgd with a momentum, so it needs both")

    def scaled_lr(self, global_batch_size: int) -> float:
        """The learning rate for a global batch of this size, by `lr_rule`."""
        quotient = global_batch_size / self.base_batch_size
        return self.lr * {"none": 1.0, "linear": quotient, "sqrt": math.sqrt(quotient)}[self.lr_rule]


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over time, as a factor on that of the optimizer.

    Up in a line over `warmup_epochs`. Then `steps`: times `gamma` at the beginning of each epoch in `milestones`, counted from 0; or `cosine`:
    along half a cosine down to `final_factor` at the last step.
    """

    kind: Literal["steps", "cosine"] = "steps"
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = ()
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    warmup_epochs: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    final_factor: Annotated[float, Field(ge=0, le=1)] = 0.0


@dataclass(frozen=True)
class ImageConfig(RunConfig):
    """A whole run.

    `label_smoothing` is that of the training loss. `ema_decay`: evaluate, and keep beside the weights, their average, of which this share stays
    with each update. `channels_last` lays images and weights out pixel by pixel, as tensor cores like it.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    channels_last: bool = False

    @property
    def lr(self) -> float:
        """The learning rate before the schedule."""
        return self.optimizer.scaled_lr(self.data.global_batch_size)
