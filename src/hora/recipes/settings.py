"""What the configurations of several recipes have in common. Imports no torch."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import Field

from hora.errors import ConfigError
from hora.train.config import load_config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept: a checkpoint is written after each epoch, and every `every_steps` steps unless that is None.

    `background`: while training goes on, from a copy of the state. What is saved when a signal stops the run is waited for in any case.
    `end_after_failed_saves`: where the disk refuses a checkpoint training goes on, with a warning, until so many in a row have failed; 1: it
    ends at the first. The last save of a run, and that after a signal, must succeed in any case.
    """

    every_steps: Count | None = None
    keep_last: Count = 2
    keep_best: Annotated[int, Field(ge=0)] = 1
    background: bool = True
    end_after_failed_saves: Count = 3


@dataclass(frozen=True)
class RunConfig:
    """How a run trains, whatever it trains.

    `exact` makes the run the same to the last bit on any number of ranks up to `logical_ranks`, which it keeps for its life, as it does
    `num_threads`, those of each rank on the CPU (outside exact mode the launcher's choice).
    `precision` is what autocast computes in, `compile` is that of `TrainStep`, `capture: false` keeps steps on GPUs out of CUDA graphs, and
    `strategy` is that of `hora.DistributedOptimizer`; of these runs may change when they go on.
    `tf32` lets GPUs round float32 products to 10 bits: faster for large models, and runs on different numbers of ranks part sooner.
    `tensorboard`: whether it is written for TensorBoard too, where that is installed.
    """

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    epochs: Count = 10
    exact: bool = False
    logical_ranks: Count = 8
    num_threads: Count = 1
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool | Literal["parts", "regions"] = False
    capture: bool = True
    strategy: Literal["overlap", "deferred", "sharded"] = "overlap"
    tf32: bool = False
    tensorboard: bool = True


def named_config(kind: type[C], name: str, named: Mapping[str, C], overrides: Sequence[str]) -> C:
    """The configuration called `name`, or that in the YAML file `name`, with `overrides` over it.

    Raises:
        ConfigError: it is neither, or something in it is wrong.
    """
    if name in named:
        return load_config(kind, None, overrides, defaults=asdict(named[name]))
    if not Path(name).is_file():
        raise unknown_config("--config", "a YAML file or one of", name, named)
    return load_config(kind, Path(name), overrides)


def unknown_config(word: str, kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error of a `word` that stands for no configuration."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return ConfigError(
        f"{word} must be {kind} {', '.join(names)}, but is {name!r} instead" + (f"; did you mean {nearest[0]}?" if nearest else "")
    )
