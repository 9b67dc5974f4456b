"""The course of a run in epochs: steps, log lines, checkpoints, and where it may be left. What is trained is the recipe's business."""

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
        preempted: the name of the signal that ended it before it was done; empty otherwise.
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
    """Epochs of steps, each with its log lines and checkpoints.

    Collective: all ranks make it and call its methods.

    Attributes:
        metrics: where measurements go; set before `go`.
        checkpointer: to be entered around `go`.
        stopwatch: runs while steps are made.
    """

    report: CourseReport

    def __init__(
        self,
        trainer: Trainable,
        steps: Steps,
        epochs: int,
        keep: CheckpointConfig,
        directory: RunDirectory,
        preemption: Preemption,
        best: Best,
    ) -> None:
        self._trainer, self._steps, self._epochs, self._keep, self._preemption = trainer, steps, epochs, keep, preemption
        self.checkpointer = Checkpointer(
            directory.checkpoints,
            keep_last=keep.keep_last,
            keep_best=keep.keep_best,
            best=best,
            end_after_failed_saves=keep.end_after_failed_saves,
        )
        self.metrics = MetricsWriter()
        self.stopwatch = Stopwatch()

    @abstractmethod
    def update(self, step: Any) -> None:
        """Trains on one global batch."""

    @abstractmethod
    def measure(self, epoch: int) -> dict[str, float]:
        """Records what training has come to since the last time, ten times an epoch; returns what is shown of it."""

    @abstractmethod
    def close_epoch(self, epoch: int) -> None:
        """Evaluates and saves."""

    def begin(self, *, resume: bool, init_from: Path | None = None, allow_torch_file: bool = False) -> None:
        """Gets ready to write checkpoints, and restores the latest one or weights to begin with."""
        self.checkpointer.prepare(self._trainer.size_bytes())
        if resume or (session().generation > 0 and not self.checkpointer.is_empty()):
            restored = self.checkpointer.load()
            self._trainer.restore(restored.state)
            log.get_logger().info("resumed at step %d from %s", self._trainer.step, restored.path)
            return
        if init_from is not None:
            load_weights(init_from, self._trainer.model, allow_torch_file=allow_torch_file)

    def go(self) -> bool:
        """Trains the epochs that are left; False if it stopped early, with a checkpoint, because a signal asked for it."""
        while self._steps.epoch < self._epochs:
            epoch = self._steps.epoch
            if not self._train_epoch(epoch):
                return False
            self.close_epoch(epoch)
        return True

    def save_epoch(self, epoch: int, metric: float) -> None:
        """Writes the checkpoint of a whole epoch, with what it is worth; that of the last one must succeed."""
        self._save(epoch, metric=metric, final=epoch + 1 >= self._epochs)

    def _save(self, epoch: int, *, metric: float | None = None, background: bool = True, final: bool = False) -> Path | None:
        """Writes a checkpoint, in the background unless the run wants it otherwise."""
        background = background and self._keep.background
        trainer = self._trainer
        with self.stopwatch.paused():
            return self.checkpointer.save(
                trainer.state(), step=trainer.step, epoch=epoch, metric=metric, background=background, final=final
            )

    def _train_epoch(self, epoch: int) -> bool:
        """Trains to the end of the epoch; False if the run has been saved and is to end."""
        trainer, total = self._trainer, len(self._steps)
        begun_s, whole = self.stopwatch.seconds, self._steps.step == 0
        shown: dict[str, float] = {}
        with open_progress(total, f"epoch {epoch + 1}/{self._epochs}", rank=session().rank) as progress, self.stopwatch:
            for step in self._steps:
                if self._preemption.requested:
                    trainer.optimizer.request_stop()
                self.update(step)
                if is_tenth(step.index, total):
                    shown = self.measure(epoch)
                progress.show(step.index + 1, **shown)
                if trainer.optimizer.stop_agreed:
                    return self._stop(epoch)
                if self._is_save_due(step.index):
                    self._save(epoch)
        if whole:
            self.report.epoch_s[epoch] = self.stopwatch.seconds - begun_s
        return True

    def _is_save_due(self, index: int) -> bool:
        every = self._keep.every_steps
        # The last step of an epoch is saved with what it is worth.
        return every is not None and self._trainer.step % every == 0 and index + 1 < len(self._steps)

    def _stop(self, epoch: int) -> bool:
        path = self._save(epoch, background=False, final=True)
        self.report.preempted = self._preemption.reason or "another rank"
        log.get_logger().info("asked to stop (%s): step %d is saved in %s", self.report.preempted, self._trainer.step, path)
        return False
