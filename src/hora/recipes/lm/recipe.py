"""Trains a language model on any number of ranks: the whole run, from the configuration to the test perplexity.

Every rank calls `train` after `hora.init()`. What a step does is in `trainer`, what a perplexity is in `evaluation`.
"""

from pathlib import Path

from hora import log
from hora.comm.session import session
from hora.errors import CheckpointError, CheckpointMismatch
from hora.recipes.lm.config import LmConfig
from hora.recipes.lm.data import Corpus, load_corpus
from hora.recipes.lm.evaluation import evaluate
from hora.recipes.lm.report import Report
from hora.recipes.lm.trainer import Trainer
from hora.recipes.lm.vocabulary import Vocabulary
from hora.recipes.meter import Tally
from hora.recipes.sameness import require_mode
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.config import dump_config
from hora.train.files import replace_file
from hora.train.metrics import MetricsRow, MetricsWriter
from hora.train.precision import float32_products
from hora.train.preemption import Preemption
from hora.train.progress import open_progress
from hora.train.rank_zero import on_rank_zero
from hora.train.run_directory import RunDirectory
from hora.train.stopwatch import Stopwatch
from hora.train.weights import load_weights


def train(config: LmConfig, path: Path, *, resume: bool = False, init_from: Path | None = None, allow_torch_file: bool = False) -> Report:
    """Trains as `config` says and leaves everything in the run directory `path`. Collective.

    Args:
        config: of a run that is resumed: the same, but for what may change (`epochs`, `checkpoint`, `optimizer.lr`, `optimizer.clip_norm`).
        path: made if it is not there.
        resume: go on from the latest checkpoint in `path`.
        init_from: weights to begin with, as `hora.train.weights.load_weights` reads them.
        allow_torch_file: whether those may be a file of `torch.save`.

    Raises:
        ConfigError: the configuration, the texts or the run directory are not as they must be; before the first step.
        CheckpointError: there is nothing to resume from, or it does not fit.
        NonFiniteGradient, NonFiniteLoss: training diverged.
    """
    require_mode(config.logical_ranks if config.exact else None)
    with Preemption() as preemption:
        corpus = load_corpus(config.data)
        trainer = Trainer(config, corpus)
        # The directory is claimed once all is well with what the user gave, so that a mistake leaves none behind.
        restarted = session().generation > 0
        with RunDirectory(path, config=dump_config(config), resume=resume, restarted=restarted) as directory:
            run = _Run(config, corpus, trainer, directory, preemption)
            run.begin(resume=resume, init_from=init_from, allow_torch_file=allow_torch_file)
            metrics = directory.open_metrics(after_step=trainer.step, tensorboard=config.tensorboard)
            with metrics as run.metrics, float32_products(tf32=config.tf32), run.checkpointer:
                run.go()
            directory.draw_curve()
            return run.report


class _Run:
    """The course of a run: epochs with their log lines and checkpoints, evaluation, and where it may be left."""

    def __init__(self, config: LmConfig, corpus: Corpus, trainer: Trainer, directory: RunDirectory, preemption: Preemption) -> None:
        self._config = config
        self._corpus = corpus
        self._directory = directory
        self._preemption = preemption
        keep = config.checkpoint
        self.checkpointer = Checkpointer(directory.checkpoints, keep_last=keep.keep_last, keep_best=keep.keep_best)
        self.trainer = trainer
        self.metrics = MetricsWriter()
        self.report = Report()
        self._stopwatch = Stopwatch()
        self._steps_timed = 0

    def begin(self, *, resume: bool, init_from: Path | None, allow_torch_file: bool) -> None:
        """Gets ready to write checkpoints, and restores the latest one or weights to begin with."""
        keep_vocabulary(self._directory.path / "vocab.json", self._corpus.vocabulary)
        self.checkpointer.prepare(self.trainer.size_bytes())
        if resume or (session().generation > 0 and not self.checkpointer.is_empty()):
            restored = self.checkpointer.load()
            self.trainer.restore(restored.state)
            log.get_logger().info("resumed at step %d from %s", self.trainer.step, restored.path)
            return
        if init_from is not None:
            load_weights(init_from, self.trainer.model, allow_torch_file=allow_torch_file)

    def go(self) -> None:
        """Trains the epochs that are left, and tests; or stops early, with a checkpoint, when a signal asks for it."""
        stream, epochs = self.trainer.stream, self._config.epochs
        while stream.epoch < epochs:
            epoch = stream.epoch
            if not self._train_epoch(epoch):
                return
            self._close_epoch(epoch)
        self.report.test = self._evaluate("test", epochs - 1)
        log.get_logger().info("test perplexity %.4f", self.report.test)

    def _train_epoch(self, epoch: int) -> bool:
        """Trains to the end of the epoch; False if the run has been saved and is to end."""
        trainer, rank = self.trainer, session().rank
        begun_s, whole = self._stopwatch.seconds, trainer.stream.step == 0
        shown: dict[str, float] = {}
        with open_progress(len(trainer.stream), f"epoch {epoch + 1}/{self._config.epochs}", rank=rank) as progress, self._stopwatch:
            for step in trainer.stream:
                if self._preemption.requested:
                    trainer.optimizer.request_stop()
                trainer.update(step)
                self._steps_timed += 1
                if is_tenth(step.index, len(trainer.stream)):
                    shown = self._measure(epoch)
                progress.show(step.index + 1, **shown)
                if trainer.optimizer.stop_agreed:
                    return self._stop(epoch)
                if self._is_save_due(step.index):
                    self._save(epoch)
        if whole:
            self.report.epoch_s[epoch] = self._stopwatch.seconds - begun_s
        return True

    def _close_epoch(self, epoch: int) -> None:
        """Evaluates and saves."""
        self.report.train[epoch] = self.trainer.epoch_tally.perplexity
        self.report.valid[epoch] = self._evaluate("valid", epoch)
        self._save(epoch, metric=self.report.valid[epoch])
        log.get_logger().info(
            "epoch %d/%d: training perplexity %.4f, validation perplexity %.4f",
            epoch + 1, self._config.epochs, self.report.train[epoch], self.report.valid[epoch],
        )  # fmt: skip

    def _measure(self, epoch: int) -> dict[str, float]:
        """Records the training loss since the last time."""
        tally = self.trainer.collect()
        tokens_per_s = self._steps_timed * self.trainer.tokens_per_step / self._stopwatch.lap()
        self._steps_timed = 0
        self.report.tokens_per_s.append(tokens_per_s)
        self._record("train", epoch, tally, tokens_per_s=tokens_per_s)
        return {"perplexity": tally.perplexity, "lr": self.trainer.lr, "tokens/s": tokens_per_s}

    def _evaluate(self, split: str, epoch: int) -> float:
        tally = evaluate(self.trainer.model, self._corpus.tokens[split], self._config.data)
        self._record(split, epoch, tally)
        return tally.perplexity

    def _record(self, split: str, epoch: int, tally: Tally, *, tokens_per_s: float | None = None) -> None:
        row = MetricsRow(
            step=self.trainer.step, epoch=epoch, split=split, loss=tally.loss, perplexity=tally.perplexity, tokens=tally.tokens,
            tokens_per_s=tokens_per_s, lr=self.trainer.lr,
        )  # fmt: skip
        self.metrics.write(row)

    def _is_save_due(self, index: int) -> bool:
        every = self._config.checkpoint.every_steps
        # The last step of an epoch is saved with the validation perplexity.
        return every is not None and self.trainer.step % every == 0 and index + 1 < len(self.trainer.stream)

    def _save(self, epoch: int, *, metric: float | None = None, background: bool = True) -> Path:
        background = background and self._config.checkpoint.background
        with self._stopwatch.paused():
            return self.checkpointer.save(self.trainer.state(), step=self.trainer.step, epoch=epoch, metric=metric, background=background)

    def _stop(self, epoch: int) -> bool:
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            log.get_logger().warning("%s; step %d is tried now", error, self.trainer.step)
        path = self._save(epoch, background=False)
        self.report.preempted = self._preemption.reason or "another rank"
        log.get_logger().info("asked to stop (%s): step %d is saved in %s", self.report.preempted, self.trainer.step, path)
        return False


def is_tenth(index: int, total: int) -> bool:
    """Whether step `index` of `total` completes another tenth of them; each step does when there are fewer than ten."""
    return (index + 1) * 10 // total > index * 10 // total


def keep_vocabulary(path: Path, vocabulary: Vocabulary) -> None:
    """Writes the vocabulary to `path`, or compares it with what a run that goes on has there. Collective.

    Raises:
        CheckpointMismatch: they differ.
    """

    def keep() -> None:
        if not path.exists():
            replace_file(path, vocabulary.to_json().encode())
        elif Vocabulary.from_json(path.read_text(encoding="utf-8")).digest != vocabulary.digest:
            raise CheckpointMismatch(
                f"the words of the training text must be those of {path}, but are others now; give the same --data and data.max_vocabulary, or "
                "begin anew in another run directory"
            )

    on_rank_zero(keep)
