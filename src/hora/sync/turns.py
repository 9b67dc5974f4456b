"""Whose turn it is in a window: outside exact mode the rank's own, in exact mode one logical rank's after the other.

The synchroniser tells what happens; how gradients are summed, which random numbers are in force and what becomes of buffers follows from whose turn
it is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hora.comm.session import Session
from hora.errors import ConfigError
from hora.sync.exact import NormBuffers, RandomTurns, micro_steps, require_dealt, require_exact_model
from hora.sync.gradients import GradientBucket
from hora.sync.ordered import OrderedSums
from hora.sync.sums import Sums


class Turns(Protocol):
    """What the synchroniser asks, in this order, once a window."""

    @property
    def sums(self) -> Sums:
        """How the buckets are summed."""

    @property
    def part(self) -> int:
        """The part of the global batch whose turn it is, as the control message counts weights."""

    def require_plain(self) -> None:
        """Refuses a window that is not driven by `micro_batches`, if that is needed to know whose turn it is."""

    def window(self, step: Iterable[Any]) -> AbstractContextManager[None]:
        """The window of `step`, from before its first micro-batch to behind its last."""

    def next_micro_batch(self) -> None:
        """The next micro-batch is about to be handed out."""

    def begin_last(self) -> None:
        """The last backward of the window is about to begin."""

    def complete(self, weights: Mapping[int, float | Tensor], total_weight: Tensor) -> None:
        """The last backward of the window is done. Collective."""

    def captured(self, graph: torch.cuda.CUDAGraph, num_micro_steps: int) -> AbstractContextManager[Callable[[Any], None]]:
        """Inside the `with` block a window is captured into `graph`; gives what is to be called with a step before its replay."""


class PlainTurns:
    """Always this rank's own turn."""

    part = 0

    def __init__(self, sums: Sums):
        self.sums = sums

    def require_plain(self) -> None:
        """Every window will do."""

    def window(self, step: Iterable[Any]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Nothing need be known of it."""
        return nullcontext()

    def next_micro_batch(self) -> None:
        """It is this rank's again."""

    def begin_last(self) -> None:
        """Begins the sums."""
        self.sums.begin()

    def complete(self, weights: Mapping[int, float | Tensor], total_weight: Tensor) -> None:
        """Leaves buffers as they are."""

    def captured(self, graph: torch.cuda.CUDAGraph, num_micro_steps: int) -> AbstractContextManager[Callable[[Any], None]]:  # noqa: ARG002
        """The graph goes on with torch's generator by itself."""
        return nullcontext(lambda _: None)


class ExactTurns:
    """One after the other the logical ranks that this rank plays.

    `name` tells the model from others: those have other random numbers.

    Raises:
        ConfigError: the model has layers that no order makes exact.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[GradientBucket], here: Session, name: str):
        require_exact_model(model)
        assert here.exact is not None
        self.sums = OrderedSums(buckets, here)
        self.part = here.logical_ranks.played_by(here.rank).start
        self._random = RandomTurns(here.exact, here.device, name)
        self._buffers = NormBuffers(model, here.logical_ranks, here.device)
        self._coming: Iterator[tuple[int, int]] = iter(())
        self._begun = False

    def require_plain(self) -> None:
        """Refuses them all."""
        raise ConfigError(
            "in exact mode the loop must be `for batch in optimizer.micro_batches(step): ... optimizer.backward(loss_sum, weight=n)`: a plain "
            "loss.backward() does not say which logical rank it is for, nor how much it weighs"
        )

    @contextmanager
    def window(self, step: Iterable[Any]) -> Iterator[None]:
        """Begins the sums and lends the generators."""
        dealt = require_dealt(step)
        self._coming, self._begun = micro_steps(dealt.logical_ranks), False
        self.sums.begin()
        self._buffers.begin()
        self._random.begin(dealt)
        with self._random.lent():
            yield

    def next_micro_batch(self) -> None:
        """Gives the turn to the logical rank of the micro-batch."""
        logical_rank, micro_step = next(self._coming)
        if micro_step == 0:
            if self._begun:
                self._buffers.leave(self.part)
            self.sums.enter(logical_rank)
            self.part, self._begun = logical_rank, True
        self._random.enter(logical_rank, micro_step)

    def begin_last(self) -> None:
        """The sums have begun with the window."""

    def complete(self, weights: Mapping[int, float | Tensor], total_weight: Tensor) -> None:
        """Combines the buffers."""
        if self._begun:
            self._buffers.leave(self.part)
        self._buffers.combine(weights, total_weight)

    def captured(self, graph: torch.cuda.CUDAGraph, num_micro_steps: int) -> AbstractContextManager[Callable[[Any], None]]:
        """Gives what seeds the generators anew, which must be done before each replay."""
        return self._random.captured(graph, num_micro_steps)
