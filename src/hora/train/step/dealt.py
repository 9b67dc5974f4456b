"""The micro-batches of a step on the device. In exact mode with what tells whose they are, which a plain list would lose."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hora.comm.session import session
from hora.sync.control import NOWHERE, Place
from hora.sync.exact import DealtStep, require_dealt
from hora.train.step.tree import to_device


@dataclass(frozen=True)
class DealtBatches:
    """Micro-batches of logical ranks (`hora.sync.exact.DealtStep`)."""

    micro_batches: list[Any]
    epoch: int
    index: int
    logical_ranks: tuple[int, ...]
    of_job: bool = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


@dataclass(frozen=True)
class OfStep:
    """Micro-batches, brought to the device one by one perhaps, of a step that all ranks make together (`hora.sync.control.Place`)."""

    micro_batches: Iterable[Any]
    epoch: int
    index: int
    of_job: bool = True

    def __iter__(self) -> Iterator[Any]:
        return iter(self.micro_batches)


Batches = list[Any] | DealtBatches


def on_device(step: Iterable[Any]) -> Batches:
    """The micro-batches of `step`, tensors on the device.

    Raises:
        ConfigError: in exact mode, if `step` does not say whose they are.
    """
    if session().exact is not None:
        require_dealt(step)
    return like_step(step, [to_device(micro_batch, session().device) for micro_batch in step])


def like_step(step: Iterable[Any], micro_batches: list[Any]) -> Batches:
    """`micro_batches`, belonging to whom those of `step` do."""
    if not isinstance(step, DealtStep):
        return micro_batches
    return DealtBatches(micro_batches, step.epoch, step.index, tuple(step.logical_ranks), getattr(step, "of_job", False))


def of_step(step: Iterable[Any], micro_batches: Iterable[Any]) -> Iterable[Any]:
    """`micro_batches`, at the place in the data where `step` is."""
    place = Place.of(step)
    return micro_batches if place == NOWHERE else OfStep(micro_batches, *place)


def logical_ranks_of(step: Iterable[Any]) -> tuple[int, ...]:
    """For each micro-batch its logical rank, where that is known."""
    return tuple(step.logical_ranks) if isinstance(step, DealtStep) else ()
