"""Steps, and what yields them epoch after epoch: the position in the data and how it is saved.

A `StepLoader` knows how far its steps have been handed out; what a step is made of is its subclass's business. The position is (epoch,
step): it does not depend on the number of ranks, nor on what worker processes have loaded ahead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hora import events
from hora.errors import CheckpointMismatch, ConfigError, DataError
from hora.plan.samples import MicroStep


class Loaded(NamedTuple):
    """A micro-batch that has been loaded, and the samples that it holds."""

    batch: Any
    indices: Sequence[int]


class Step:
    """This rank's micro-batches of one global batch, to be iterated once.

    Its length is the number of micro-batches: 0 when the global batch has no sample for this rank.

    Attributes:
        epoch: number of the epoch.
        index: number of the step in its epoch.
        logical_ranks: for each micro-batch the logical rank that it belongs to.
        counts: asked for the number of micro-batches of each rank, where all of them can know; else None.
        of_job: whether all ranks of the job are to make this step together; not that of a loader made with `rank` and `world_size`.
    """

    def __init__(
        self,
        epoch: int,
        index: int,
        micro_steps: Sequence[MicroStep],
        loaded: Iterator[Loaded],
        counts: Callable[[], Sequence[int]] | None = None,
        of_job: bool = False,
    ):
        self.counts = counts
        self.of_job = of_job
        self.epoch = epoch
        self.index = index
        self.logical_ranks = tuple(micro_step.logical_rank for micro_step in micro_steps)
        self._loaded = loaded
        self._taken = 0

    def __len__(self) -> int:
        return len(self.logical_ranks)

    def __iter__(self) -> Iterator[Any]:
        if 0 < len(self) == self._taken:
            raise DataError(
                f"step {self.index} of epoch {self.epoch} can be iterated once, before the loader is asked for the next step, but its "
                "micro-batches have been handed out or passed over"
            )
        while self._taken < len(self):
            yield self._take()

    def __repr__(self) -> str:
        return f"Step(epoch={self.epoch}, index={self.index}, micro_batches={len(self)})"

    def hold(self) -> "HeldStep":
        """The micro-batches of this step together, for loops that go through them more than once."""
        return HeldStep(self)

    def pass_over(self) -> None:
        """Leaves out the micro-batches that have not been taken."""
        while self._taken < len(self):
            self._taken += 1
            next(self._loaded)

    def _take(self) -> Any:
        events.observer().on_mark(events.Mark.DATA_BEGIN)
        loaded = next(self._loaded)
        events.observer().on_mark(events.Mark.DATA_END)
        self._taken += 1
        events.observer().on_samples(epoch=self.epoch, step=self.index, micro_step=self._taken - 1, indices=loaded.indices)
        return loaded.batch


class HeldStep:
    """The micro-batches of a step in memory, to be iterated as often as wanted, with what the step says of them."""

    def __init__(self, step: Step):
        self.epoch, self.index, self.logical_ranks, self.counts = step.epoch, step.index, step.logical_ranks, step.counts
        self.of_job = step.of_job
        self._batches = list(step)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __repr__(self) -> str:
        return f"HeldStep(epoch={self.epoch}, index={self.index}, micro_batches={len(self)})"


class StepLoader(ABC):
    """Yields the steps of an epoch; iterated again, those of the next one.

    Attributes:
        epoch: the epoch under way, or the next one between two.
        step: how many steps of it have been handed out.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0
        self._begun = False
        self._pass: object = None
        self._order: str | None = None

    @abstractmethod
    def _steps(self, epoch: int, first: int) -> Iterator[Step]:
        """The steps of `epoch` from number `first` on."""

    @abstractmethod
    def _facts(self) -> Mapping[str, Any]:
        """What decides which samples are in which step."""

    def __iter__(self) -> Iterator[Step]:
        if self._begun:  # and not completed: it was left early
            self._move(self.epoch + 1, 0)
        self._begun = True
        self._pass = this_pass = object()
        for step in _waited_for(self._steps(self.epoch, self.step)):
            self.step = step.index + 1
            yield step
            if self._pass is not this_pass:
                raise DataError(
                    "a loader is iterated by one loop at a time, but another one began, or its position was set, before this ended"
                )
            step.pass_over()
        self._move(self.epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration the one of `epoch`. Not needed: epochs advance by themselves. A position just restored in it is kept."""
        if epoch < 0:
            raise ConfigError(f"epoch must be at least 0, but is {epoch} instead")
        if self._begun or epoch != self.epoch:
            self._move(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step that was handed out, and the facts it depends on; the same on every rank."""
        drawn = {} if self._order is None else {"order": self._order}
        return {"epoch": self.epoch, "step": self.step, **self._facts(), **drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on where `state` was taken; the number of ranks may be another one.

        Raises:
            CheckpointMismatch: the data set or the plan is another one than that of `state`, so the position would mean other samples. When the
                next iteration begins: a sampler draws another order than it had drawn.
        """
        facts = {"epoch": self.epoch, "step": self.step, **self._facts()}
        if missing := facts.keys() - state.keys():
            raise CheckpointMismatch(
                f"the state of a {type(self).__name__} must have {', '.join(sorted(missing))}, but has {sorted(state)}"
            )
        differing = [f"{name} is {facts[name]!r} here and {state[name]!r} there" for name in self._facts() if facts[name] != state[name]]
        if differing:
            raise CheckpointMismatch(
                f"the position of a {type(self).__name__} can be restored only with the data and the settings it was saved with, but "
                + "; ".join(differing)
            )
        self._move(int(state["epoch"]), int(state["step"]))
        self._order = state.get("order")

    def _require_order(self, drawn: str) -> None:
        """Takes the digest of the order that a sampler has drawn for the epoch, which a position that was restored is a position in."""
        if self._order not in (None, drawn):
            raise CheckpointMismatch(
                f"a sampler must draw the order of epoch {self.epoch} again as it was when the position was saved, or samples come twice and others "
                "not at all, but it drew another one; let it draw from the global generators of torch, random or NumPy, or from its attribute "
                "`generator`, which the loader seeds by the epoch, or seed it by the epoch in its set_epoch"
            )
        self._order = drawn

    def _move(self, epoch: int, step: int) -> None:
        self.epoch, self.step, self._begun, self._pass, self._order = epoch, step, False, None, None


def _waited_for(steps: Iterator[Step]) -> Iterator[Step]:
    while True:
        events.observer().on_mark(events.Mark.DATA_BEGIN)
        step = next(steps, None)
        events.observer().on_mark(events.Mark.DATA_END)
        if step is None:
            return
        yield step
