"""What a language model run is made of: one tree of dataclasses, and the configurations that have a name.

`small`, `medium` and `large` are the LSTMs of Zaremba, Sutskever and Vinyals (*Recurrent Neural Network Regularization*, arXiv:1409.2329)
as Texar's distributed PTB example trains them; `large-original` begins to lower the learning rate one epoch earlier, as published. Imports
no torch, so that a wrong value is told before a rank is started.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from hora.errors import ConfigError
from hora.recipes.settings import Amount, CheckpointConfig, Count, RunConfig

Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    `keep_prob` is the share of activations that dropout keeps, on the embedded input and on every layer's output. `init_scale`: weights begin
    uniform between minus and plus this (`lstm`), or normal with this deviation (`transformer`). `num_heads` is the Transformer's alone.
    """

    kind: Literal["lstm", "transformer"] = "lstm"
    hidden_size: Count = 200
    num_layers: Count = 2
    num_heads: Count = 1
    keep_prob: Share = 1.0
    init_scale: Amount = 0.1

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ConfigError(f"hidden_size = {self.hidden_size} must be a multiple of num_heads = {self.num_heads}")


@dataclass(frozen=True)
class DataConfig:
    """The text.

    A step takes `window` tokens of each of `rows` rows: the rows of the whole job, whatever the number of ranks. `path` is a directory, the
    name of a data set that can be fetched, or `excerpt`. `undecodable` says what happens to a line that is not UTF-8.
    """

    path: str = ""
    rows: Count = 20
    window: Count = 20
    micro_batch_size: Count | None = None
    max_vocabulary: Annotated[int, Field(ge=2)] | None = None
    undecodable: Literal["error", "skip", "replace"] = "error"


@dataclass(frozen=True)
class OptimizerConfig:
    """The update.

    The gradient of the summed loss is divided by the global batch's rows or tokens (`normalize`), then its norm over all parameters is cut to
    `clip_norm`. `momentum` is that of `sgd` alone.
    """

    kind: Literal["sgd", "adamw"] = "sgd"
    lr: Amount = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_norm: Amount = 5.0
    normalize: Literal["rows", "tokens"] = "rows"


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over time, as a factor on `optimizer.lr`.

    `epochs`: `decay ** max(epoch - last_full_epoch, 0)`, epochs counted from 0. `cosine`: up in a line over `warmup_steps`, then along half a
    cosine down to `final_factor` at the last step.
    """

    kind: Literal["epochs", "cosine"] = "epochs"
    decay: Share = 0.5
    last_full_epoch: Annotated[int, Field(ge=0)] = 3
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_factor: Annotated[float, Field(ge=0, le=1)] = 0.1


@dataclass(frozen=True)
class LmConfig(RunConfig):
    """A whole run. The defaults are those of `small`."""

    epochs: Count = 13
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.exact and self.logical_ranks > self.data.rows:
            raise ConfigError(
                f"each logical rank must have a row, but logical_ranks = {self.logical_ranks} is more than data.rows = {self.data.rows}"
            )


_large = LmConfig(
    epochs=55,
    model=ModelConfig(hidden_size=1500, keep_prob=0.35, init_scale=0.04),
    data=DataConfig(window=35),
    optimizer=OptimizerConfig(clip_norm=10.0),
    schedule=ScheduleConfig(decay=1 / 1.15, last_full_epoch=14),
)

NAMED: dict[str, LmConfig] = {
    "small": LmConfig(),
    "medium": LmConfig(
        epochs=39,
        model=ModelConfig(hidden_size=650, keep_prob=0.5, init_scale=0.05),
        data=DataConfig(window=35),
        schedule=ScheduleConfig(decay=0.8, last_full_epoch=5),
    ),
    "large": _large,
    "large-original": replace(_large, schedule=replace(_large.schedule, last_full_epoch=13)),
    "transformer": LmConfig(
        epochs=10,
        model=ModelConfig(kind="transformer", hidden_size=256, num_layers=4, num_heads=4, keep_prob=0.8, init_scale=0.02),
        data=DataConfig(window=64),
        optimizer=OptimizerConfig(kind="adamw", lr=1e-3, weight_decay=0.01, clip_norm=1.0, normalize="tokens"),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=400),
    ),
    # At the rate of `small` rounding grows tenfold every few steps, so that no two orders of summation stay together; here it does not.
    "demo": LmConfig(
        epochs=2,
        model=ModelConfig(hidden_size=128),
        data=DataConfig(path="excerpt", max_vocabulary=3000),
        optimizer=OptimizerConfig(lr=0.07, momentum=0.9),
        schedule=ScheduleConfig(last_full_epoch=0),
    ),
}
"""The configurations that have a name, as `--config NAME` takes them."""


def canonical_name(name: str) -> str:
    """The key of `NAMED` that `name` stands for: `config_small`, as Texar's example writes it, is `small`."""
    return name.removeprefix("config_").replace("_", "-")
