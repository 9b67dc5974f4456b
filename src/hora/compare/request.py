"""What is to be compared, as asked for on the command line. Pure; loads no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from hora.diag.words import fields_of, names
from hora.errors import ConfigError

REFERENCE: Final = "single"
"""The variant that the others are compared with."""

VARIANTS: Final = {
    REFERENCE: "one process alone, a plain loop: the reference",
    "data_parallel": "nn.DataParallel: one process over all GPUs",
    "per-parameter": "an all-reduce by hand for each parameter after backward",
    "deferred": "DistributedOptimizer, sums after backward",
    "horovod": "Horovod itself",
    "ddp": "DistributedDataParallel with gradient_as_bucket_view and static_graph",
    "overlap": "DistributedOptimizer, sums during backward: Hora's default",
    "sharded": "DistributedOptimizer, optimizer state sharded over the ranks",
    "captured": "TrainStep: the whole step in a CUDA graph",
}
"""What can be compared, with what it is."""

MEANS: Final = ("horovod", "ddp")
"""Variants that average the ranks' means, which is the mean over all only where the ranks' counts are equal."""

TWIN: Final = "twin"
"""Not a variant: the reference once more, with the rows of each batch in another order. How far the two part is what rounding alone does."""

_ALONE: Final = (REFERENCE, "data_parallel")
_MOST_WARM_UP: Final = 12
_STRETCHES: Final = 20


def is_alone(variant: str) -> bool:
    """Whether it is trained by one process."""
    return variant in _ALONE


@dataclass(frozen=True)
class Request:
    """One recipe, trained in each of the ways for as many steps.

    Attributes:
        recipe: its name.
        config: words of the recipe, as are `data` and `overrides`.
        variants: in the order in which they are shown; those that can be trained here.
        ranks: processes of those that are not alone; GPUs of `data_parallel`.
        steps: updates of each training run.
        repeats: training runs of each variant.
        on_gpus: whether ranks train on GPUs.
        threads: of each process on CPUs.
        dropout: whether that of the configuration stays.
    """

    recipe: str
    config: str | None
    data: str | None
    overrides: tuple[str, ...]
    variants: tuple[str, ...]
    ranks: int
    steps: int
    repeats: int
    on_gpus: bool
    threads: int
    dropout: bool

    @property
    def warm_up(self) -> int:
        """Steps from the beginning that are trained, and not timed."""
        return min(_MOST_WARM_UP, self.steps // 4)

    def stretches(self) -> list[int]:
        """How many steps are made between two looks at the clock and the loss: first those that warm up."""
        timed = self.steps - self.warm_up
        count = min(_STRETCHES, timed)
        parts = [timed // count + (index < timed % count) for index in range(count)]
        return [self.warm_up, *parts] if self.warm_up else parts

    def of(self, variants: Sequence[str]) -> "Request":
        """The same for some of the variants."""
        return replace(self, variants=tuple(variants))

    def dump(self) -> str:
        """As JSON, for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "Request":
        """From what `dump` gave."""
        return cls(**fields_of(text))


@dataclass(frozen=True)
class Here:
    """What this machine has, and what the recipe is like.

    Attributes:
        num_gpus: that may be used.
        horovod: version of Horovod; None where it is not installed.
        carries_state: whether the model carries a state from one step to the next.
    """

    num_gpus: int
    horovod: str | None
    carries_state: bool


def chosen(variants: str | None) -> tuple[str, ...]:
    """The variants in `words`, the reference first; all by default.

    Raises:
        ConfigError: one is unknown.
    """
    asked = tuple(VARIANTS) if variants is None else names("variant", variants, tuple(VARIANTS))
    return tuple(dict.fromkeys((REFERENCE, *asked)))


def why_not(variant: str, here: Here) -> str | None:
    """Why a variant cannot be trained here; None if it can."""
    if variant == "horovod" and here.horovod is None:
        return "Horovod is not installed"
    if variant in ("data_parallel", "captured") and not here.num_gpus:
        return f"{'nn.DataParallel' if variant == 'data_parallel' else 'a CUDA graph'} needs GPUs, and CPUs train here"
    if variant == "data_parallel" and here.carries_state:
        return "nn.DataParallel cuts all tensors along their first dimension, and the rows of the state that this model carries are in their second"
    return None


def choose_ranks(nproc: int | None, num_gpus: int) -> int:
    """The number of ranks: all GPUs, or 2 on CPUs, unless said otherwise.

    Raises:
        ConfigError: there are fewer than two, or fewer GPUs.
    """
    ranks = nproc or num_gpus or 2
    if ranks < 2:
        raise ConfigError(
            "a comparison needs two ranks or more, but --nproc is 1"
            if nproc
            else "a comparison needs two ranks or more, each with a GPU of its own, and one GPU is here; give --device cpu to use CPUs"
        )
    if num_gpus and ranks > num_gpus:
        raise ConfigError(
            f"each rank needs a GPU of its own, but {ranks} ranks are asked for and {num_gpus} GPUs are here; or give --device cpu"
        )
    return ranks
