"""The course of a run: steps, log lines, checkpoints, and where it may be left. What is trained is the recipe's business."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from hora import log
from hora.comm.session import session
from hora.recipes.settings import CheckpointConfig
from hora.sync.optimizer import DistributedOptimizer
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.checkpoint.retention import Best
from hora.train.metrics import MetricsWriter
from hora.train.preemption import Preemption
from hora.train.progress import is_tenth, open_progress
from hora.train.run_directory import RunDirectory
from hora.train.stopwatch import Stopwatch
from hora.train.weights import load_weights


@dataclass
class CourseReport:
    """How a run went, the same on every rank.

    Attributes:
        preempted: the name of the signal that ended it before it was done, or "another rank" where it came to another one alone; empty otherwise.
        epoch_s: seconds of training of those epochs that this start of the run began and completed, without evaluation and saving.
    """

    preempted: str = ""
    epoch_s: dict[int, float] = field(default_factory=dict)


class Steps(Protocol):
    """What a run goes through: the steps of an epoch, and the position among them (`hora.data.steps.StepLoader`)."""

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one between two."""

    @property
    def step(self) -> int:
        """How many steps of it have been handed out."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class Trainable(Protocol):
    """What is trained: a model with its optimizer and the position in its data."""

    step: int

    @property
    def model(self) -> nn.Module:
        """What weights are loaded into."""

    @property
    def optimizer(self) -> DistributedOptimizer:
        """What makes the updates."""

    def size_bytes(self) -> int:
        """About as many bytes as a checkpoint has."""

    def state(self) -> Mapping[str, Any]:
        """All that another start of the run needs."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""


class Course(ABC):
    """Steps, epoch by epoch, with log lines and checkpoints, and where a run may be left.

    Collective: all ranks make it and call its methods.

    Attributes:
        metrics: where measurements go; set before `go`.
        checkpointer: to be entered around `go`.
        stopwatch: runs while steps are made.
    """

    report: CourseReport

    def __init__(
        self, trainer: Trainable, steps: Steps, keep: CheckpointConfig, directory: RunDirectory, preemption: Preemption, best: Best
    ) -> None:
        self._trainer, self._steps, self._keep, self._preemption = trainer, steps, keep, preemption
        self.checkpointer = Checkpointer(
            directory.checkpoints,
            keep_last=keep.keep_last,
            keep_best=keep.keep_best,
            best=best,
            end_after_failed_saves=keep.end_after_failed_saves,
        )
        self.metrics = MetricsWriter()
        self.stopwatch = Stopwatch()

    @property
    def epoch(self) -> int:
        """The epoch of the last step."""
        return self._steps.epoch if self._steps.step else max(self._steps.epoch - 1, 0)

    @property
    def ends_epoch(self) -> bool:
        """Whether the last step was that of its epoch."""
        return not self._steps.step or self._steps.step == len(self._steps)

    @abstractmethod
    def update(self, step: Any) -> None:
        """Trains on one global batch."""

    def title(self, epoch: int) -> str:
        """What the log calls an epoch."""
        return f"epoch {epoch + 1}"

    def is_measured(self) -> bool:
        """Whether there is a line of the log after the last step: ten times an epoch."""
        return is_tenth(self._steps.step - 1, len(self._steps))

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Records what training has come to since the last time; returns what is shown of it."""

    @abstractmethod
    def settle(self) -> bool:
        """Does what else is due after the last step, the stopwatch being stopped; False if the run is done although its epoch is not."""

    @abstractmethod
    def go(self) -> bool:
        """Trains until the run is done; False if it stopped earlier, with a checkpoint, because a signal asked for it."""

    def state(self) -> Mapping[str, Any]:
        """All that another start of the run needs."""
        return self._trainer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._trainer.restore(state)

    def begin(
        self, *, resume: bool, init_from: Path | None = None, pretrain_from: Path | None = None, allow_torch_file: bool = False
    ) -> None:
        """Gets ready to write checkpoints, and restores the latest one or weights to begin with; of `pretrain_from` those that fit."""
        self.checkpointer.prepare(self._trainer.size_bytes())
        if resume or (session().generation > 0 and not self.checkpointer.is_empty()):
            restored = self.checkpointer.load()
            self.restore(restored.state)
            log.get_logger().info("resumed at step %d from %s", self._trainer.step, restored.path)
            return
        for path, partial in ((init_from, False), (pretrain_from, True)):
            if path is not None:
                load_weights(path, self._trainer.model, allow_torch_file=allow_torch_file, partial=partial)

    def save(self, metric: float | None = None, *, background: bool = True, final: bool = False) -> Path | None:
        """Writes a checkpoint, in the background unless the run wants it otherwise; with what the model is worth, if that was measured."""
        background = background and self._keep.background
        state, step = self.state(), self._trainer.step
        return self.checkpointer.save(state, step=step, epoch=self.epoch, metric=metric, background=background, final=final)

    def train_epoch(self) -> bool:
        """Trains to the end of the epoch, or of the run; False if the run has been saved and is to be left."""
        trainer, epoch = self._trainer, self._steps.epoch
        begun_s, whole = self.stopwatch.seconds, self._steps.step == 0
        shown: dict[str, float] = {}
        with open_progress(len(self._steps), self.title(epoch), rank=session().rank) as progress, self.stopwatch:
            for step in self._steps:
                if self._preemption.requested:
                    trainer.optimizer.request_stop()
                self.update(step)
                if self.is_measured():
                    shown = self.measure()
                progress.show(step.index + 1, **shown)
                with self.stopwatch.paused():
                    if trainer.optimizer.stop_agreed:
                        return self._stop()
                    if not self.settle():
                        break
        if whole and self.ends_epoch:
            self.report.epoch_s[epoch] = self.stopwatch.seconds - begun_s
        return True

    def _stop(self) -> bool:
        path = self.save(background=False, final=True)
        self.report.preempted = self._preemption.reason or "another rank"
        log.get_logger().info("asked to stop (%s): step %d is saved in %s", self.report.preempted, self._trainer.step, path)
        return False


class EpochCourse(Course):
    """Whole epochs: each ends with an evaluation and a checkpoint, and there may be checkpoints every so many steps."""

    def __init__(
        self,
        trainer: Trainable,
        steps: Steps,
        keep: CheckpointConfig,
        directory: RunDirectory,
        preemption: Preemption,
        best: Best,
        *,
        epochs: int,
    ) -> None:
        super().__init__(trainer, steps, keep, directory, preemption, best)
        self._epochs = epochs

    @abstractmethod
    def close_epoch(self) -> None:
        """Evaluates and saves after the last step of an epoch."""

    def title(self, epoch: int) -> str:
        """What the log calls an epoch: with how many there are."""
        return f"{super().title(epoch)}/{self._epochs}"

    def go(self) -> bool:
        """Trains the epochs that are left; False if it stopped earlier, with a checkpoint, because a signal asked for it."""
        if self._is_over():
            log.get_logger().info(
                "nothing is left to train: %d epochs are done, and epochs is %d; give more to go on", self._steps.epoch, self._epochs
            )
        while not self._is_over():
            if not self.train_epoch():
                return False
            self.close_epoch()
        return True

    def settle(self) -> bool:
        """Saves where that is due."""
        every = self._keep.every_steps
        # The last step of an epoch is saved with what it is worth.
        if every is not None and self._trainer.step % every == 0 and not self.ends_epoch:
            self.save()
        return True

    def save_epoch(self, metric: float) -> None:
        """Writes the checkpoint of a whole epoch, with what it is worth; that of the last one must succeed."""
        self.save(metric, final=self._is_over())

    def _is_over(self) -> bool:
        return self._steps.epoch >= self._epochs
