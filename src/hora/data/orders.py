"""Orders of samples: planned ones, and those that a user's sampler draws, made repeatable and the same on all ranks.

A sampler draws from torch's global generator or from one of its own. Before each epoch both are lent seeds of (seed, epoch), so that every
rank draws the same order and a resumed run draws it again. The order of one epoch is kept in memory: 8 bytes a sample.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch.utils.data.distributed import DistributedSampler

from hora.comm.objects import all_gather_object
from hora.comm.randomness import lent_generators, seed_generators
from hora.errors import CollectiveMismatch, ConfigError
from hora.plan.samples import GivenOrder, Order, SamplePlan
from hora.plan.seeds import derive_key


class Orders(Protocol):
    """Gives each epoch its order."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What decides the orders."""

    @property
    def num_steps(self) -> int | None:
        """Global batches of an epoch; None when nobody knows before it is drawn."""

    def order(self, epoch: int) -> Order:
        """The order of `epoch`."""


@dataclass(frozen=True)
class PlannedOrders:
    """The orders of a plan.

    Raises:
        ConfigError: `length`, asked before each epoch, is not that of the plan.
    """

    plan: SamplePlan
    length: Callable[[], int]

    @property
    def facts(self) -> Mapping[str, Any]:
        """The plan's settings."""
        return asdict(self.plan)

    @property
    def num_steps(self) -> int:
        """Global batches of each epoch."""
        return self.plan.steps_per_epoch

    def order(self, epoch: int) -> Order:
        """The order of `epoch`; computed, not stored."""
        if (length := self.length()) != self.plan.num_samples:
            raise ConfigError(
                f"a data set must keep its length, but had {self.plan.num_samples} samples when its loader was made and has {length} in epoch "
                f"{epoch}; make a new loader when it changes"
            )
        return self.plan.order(epoch)


@dataclass(frozen=True)
class DrawnOrders:
    """The orders that `batch_sampler`, iterated once an epoch, draws: a global batch at a time.

    Raises:
        ConfigError: a DistributedSampler stands behind it.
    """

    batch_sampler: Iterable[Sequence[int]]
    facts: Mapping[str, Any]
    seed: int
    in_job: bool

    def __post_init__(self) -> None:
        if any(isinstance(sampler, DistributedSampler) for sampler in self._samplers()):
            raise ConfigError(
                "a sampler must draw the samples of all ranks, but a DistributedSampler draws those of one, and pads them; leave it out: the "
                "loader deals samples to ranks itself"
            )

    @property
    def num_steps(self) -> int | None:
        """Length of the batch sampler, if it has one."""
        try:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        except TypeError:
            return None

    def order(self, epoch: int) -> Order:
        """Draws the order of `epoch`. Collective in a job: the ranks compare what they drew.

        Raises:
            ConfigError: an empty batch was drawn.
            CollectiveMismatch: the ranks drew different orders.
        """
        key = derive_key("sampler", self.seed, epoch)
        order = GivenOrder()
        with lent_generators(), self._prepared(epoch, key):
            seed_generators(key)
            for global_batch in self.batch_sampler:
                order.append([int(index) for index in global_batch])
        if self.in_job:
            _require_same(order, epoch)
        return order

    def _samplers(self) -> Iterator[Any]:
        """The batch sampler and, as torch's keep one, the sampler in it."""
        sampler: Any = self.batch_sampler
        while sampler is not None:
            yield sampler
            sampler = getattr(sampler, "sampler", None)

    @contextmanager
    def _prepared(self, epoch: int, key: int) -> Iterator[None]:
        """Tells samplers the epoch, and seeds the generators they keep, which get their states back afterwards."""
        lent: list[tuple[torch.Generator, torch.Tensor]] = []
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                lent.append((generator, generator.get_state()))
                generator.manual_seed(key)
        try:
            yield
        finally:
            for generator, state in lent:
                generator.set_state(state)


def _require_same(order: GivenOrder, epoch: int) -> None:
    digests = all_gather_object(order.digest)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise CollectiveMismatch(
            f"a sampler must draw the same order on all ranks, but in epoch {epoch} ranks {odd} drew another one than rank 0; let it draw from "
            "the global generators of torch, random or NumPy, which the loader seeds alike, or seed it with the same number everywhere"
        )
