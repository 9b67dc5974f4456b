"""When the gradients of a step are summed over the ranks: a registry of strategies, one file each.

A strategy is told that the last backward pass begins, which parameter's gradient is complete, and that the pass has ended; it has
the buckets sent, in an order all ranks share. It does not divide, clip or update.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hora.errors import ConfigError
from hora.sync.gradients import GradientBucket
from hora.sync.sums import AgreedSums


class Strategy(Protocol):
    """What the synchroniser asks of a strategy, in this order, once a step.

    Attributes:
        order: in which the buckets leave, the same on all ranks.
    """

    order: Sequence[int]

    def begin(self) -> None:
        """The last backward pass of the step is about to start."""

    def ready(self, bucket_index: int, parameter_index: int, *, settled: bool) -> None:
        """The gradient of one parameter has come on this rank, during backward; `settled`: and no hook of its parameter is to run any more."""

    def end(self) -> None:
        """The backward pass has ended. On return every bucket has been sent."""


Factory = Callable[[Sequence[GradientBucket], AgreedSums], Strategy]
_factories: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Registers the strategy made by the decorated class under `name`."""

    def keep(factory: Factory) -> Factory:
        _factories[name] = factory
        return factory

    return keep


def make(name: str, buckets: Sequence[GradientBucket], sums: AgreedSums) -> Strategy:
    """Makes the strategy registered as `name` for `buckets`, which `sums` sums.

    Raises:
        ConfigError: no strategy has that name.
    """
    from hora.sync.strategies import deferred, overlap  # noqa: F401  (each registers itself)

    if name not in _factories:
        raise ConfigError(f"unknown strategy {name!r}; choose one of: {', '.join(sorted(_factories))}")
    return _factories[name](buckets, sums)
