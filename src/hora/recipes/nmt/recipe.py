"""Trains a translation model on any number of ranks: the whole run, from the configuration to the last validation.

Every rank calls `train` after `hora.init()`. What a step does is in `trainer`, what is due after one in `triggers`, what a loss is in
`evaluation`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hora import log
from hora.comm.session import session
from hora.data.steps import Step
from hora.errors import CheckpointMismatch
from hora.recipes.course import Course
from hora.recipes.meter import Tally
from hora.recipes.nmt.config import NmtConfig
from hora.recipes.nmt.corpus import Corpus, load_corpus
from hora.recipes.nmt.evaluation import evaluate
from hora.recipes.nmt.report import Report
from hora.recipes.nmt.scoring import Scorer
from hora.recipes.nmt.stream import PairStream
from hora.recipes.nmt.trainer import Trainer
from hora.recipes.nmt.triggers import Due, Progress, due_after
from hora.recipes.nmt.vocabulary import Vocabularies
from hora.recipes.sameness import require_mode
from hora.recipes.settings import CheckpointConfig
from hora.recipes.vocabularies import FILE_NAME
from hora.train.config import dump_config
from hora.train.files import replace_file
from hora.train.metrics import MetricsRow
from hora.train.precision import float32_products
from hora.train.preemption import Preemption
from hora.train.rank_zero import on_rank_zero
from hora.train.run_directory import RunDirectory


@dataclass(frozen=True)
class Start:
    """How a run begins.

    Attributes:
        resume: go on from the latest checkpoint in the run directory.
        anew: begin, too, where a run has ended before its first checkpoint, in its place.
        init_from: weights to begin with, which must be those of the model, as `hora.train.weights.load_weights` reads them.
        pretrain_from: likewise, but those that do not fit are left.
        allow_torch_file: whether these may be a file of `torch.save`.
        debug: do all that is ever due after each step.
        valid_path: where translations go; by default `valid` in the run directory.
    """

    resume: bool = False
    anew: bool = False
    init_from: Path | None = None
    pretrain_from: Path | None = None
    allow_torch_file: bool = False
    debug: bool = False
    valid_path: Path | None = None


def train(config: NmtConfig, path: Path, start: Start | None = None) -> Report:
    """Trains as `config` says and leaves everything in the run directory `path`. Collective.

    Args:
        config: of a run that is resumed: the same, but for what may change.
        path: made if it is not there.
        start: by default a new run.

    Raises:
        ConfigError: the configuration, the texts or the run directory are not as they must be; before the first step.
        CheckpointError: there is nothing to resume from, or it does not fit; or another start of the run, or another job, writes checkpoints here.
        CheckpointUnwritten: the disk refused the last checkpoint of the run, or too many in a row; those before it are untouched.
        NonFiniteGradient, NonFiniteLoss: training diverged.
    """
    start, training = start or Start(), config.training_configs
    require_mode(training.logical_ranks if training.exact else None)
    restarted = session().generation > 0
    with Preemption() as preemption:
        corpus = load_corpus(config.data_configs, path if start.resume or restarted else None)
        trainer = Trainer(config, corpus)
        scorer = Scorer(config, corpus) if training.bleu_valid_freq > 0 else None
        # The directory is claimed once all is well with what the user gave, so that a mistake leaves none behind.
        with RunDirectory(path, config=dump_config(config), resume=start.resume, anew=start.anew, restarted=restarted) as directory:
            run = _Run(config, corpus, trainer, scorer, directory, preemption, start)
            keep_vocabularies(directory.path / FILE_NAME, corpus.vocabularies, anew=start.anew and not start.resume and not restarted)
            run.begin(
                resume=start.resume,
                init_from=start.init_from,
                pretrain_from=start.pretrain_from,
                allow_torch_file=start.allow_torch_file,
            )
            metrics = directory.open_metrics(after_step=trainer.step, tensorboard=training.tensorboard)
            with metrics as run.metrics, float32_products(tf32=training.tf32), run.checkpointer:
                if run.go():
                    run.finish()
            directory.draw_curve()
            return run.report


@dataclass(frozen=True)
class _Judged:
    """What decides which model is the best, as it was after `step`; and the best before it."""

    step: int
    value: float
    best_before: float | None


class _Run(Course):
    """The course of a run, with what is due after its steps."""

    report: Report

    def __init__(
        self,
        config: NmtConfig,
        corpus: Corpus,
        trainer: Trainer,
        scorer: Scorer | None,
        directory: RunDirectory,
        preemption: Preemption,
        start: Start,
    ) -> None:
        training = config.training_configs
        keep = CheckpointConfig(
            keep_last=training.num_kept_checkpoints,
            keep_best=training.num_kept_best_model,
            background=training.background,
            end_after_failed_saves=training.end_after_failed_saves,
        )
        super().__init__(trainer, trainer.stream, keep, directory, preemption, "min" if scorer is None else "max")
        self._training, self._corpus, self._directory, self._start = training, corpus, directory, start
        self._scorer = scorer
        self._by_bleu = scorer is not None
        self._judged_by = "bleu" if self._by_bleu else "loss"
        self.trainer = trainer
        self.report = Report()
        self._progress = Progress()
        self._tokens_timed = 0
        self._steps_timed = 0
        self._resumed = 0
        self._judged: _Judged | None = None
        self._streams: dict[str, PairStream] = {}

    def state(self) -> Mapping[str, Any]:
        """All that another start of the run needs."""
        return {**super().state(), "course": asdict(self._progress)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        super().restore(state)
        self._progress, self._resumed = Progress(**state["course"]), self.trainer.step
        self._require_same_judge()

    def _require_same_judge(self) -> None:
        """The best of two measures would be neither's."""
        before = self._progress.judged_by
        if before and self._progress.best is not None and before != self._judged_by:
            raise CheckpointMismatch(
                f"a run is judged by one measure from beginning to end, but this one was judged by {before} and would now be by "
                f"{self._judged_by}; set training_configs.bleu_valid_freq {'above 0' if before == 'bleu' else 'to 0'}, or begin a new run with "
                "--init-from"
            )

    def update(self, step: Step) -> None:
        """Trains on one global batch."""
        self._tokens_timed += self.trainer.update(step)
        self._steps_timed += 1

    def is_measured(self) -> bool:
        """Whether there is a line of the log after the last step."""
        return self._due().display

    def go(self) -> bool:
        """Trains until the run is done; False if it stopped earlier, with a checkpoint, because a signal asked for it."""
        if self.trainer.step > self._progress.settled:
            self.settle()
        while not self._is_done():
            if not self.train_epoch():
                return False
        return True

    def _is_done(self) -> bool:
        training, trainer = self._training, self.trainer
        if self._progress.num_bad >= training.early_stop_patience:
            self.report.stopped_early = True
        return (
            self.report.stopped_early
            or trainer.stream.epoch >= training.max_epochs
            or trainer.step >= (training.max_steps or trainer.step + 1)
        )

    def _is_last(self) -> bool:
        """Whether the run is done after the last step, although its epoch may not have been left yet."""
        return self._is_done() or (self.ends_epoch and self.epoch + 1 >= self._training.max_epochs)

    def _due(self) -> Due:
        return due_after(self._training, step=self.trainer.step, epoch=self.epoch, ends_epoch=self.ends_epoch, debug=self._start.debug)

    def settle(self) -> bool:
        """Does what is due after the last step; False if the run is done."""
        due, metric = self._due(), None
        if due.loss or due.bleu:
            metric = self._validate(loss=due.loss, bleu=due.bleu)
        self._progress.settled = self.trainer.step
        is_due = due.save or (self._training.save_freq is None and due.loss) or metric is not None
        # What is saved last is saved once, by `finish`.
        if is_due and not self._is_last():
            self.save(metric)
        return not self._is_done()

    def finish(self) -> None:
        """Validates and saves what has not been yet, and tests."""
        step = self.trainer.step
        loss, bleu = self._progress.validated < step, self._by_bleu and self._progress.scored < step
        metric = self._validate(loss=loss, bleu=bleu) if loss or bleu else None
        if metric is None and self._judged is not None and self._judged.step == step:
            metric = self._judged.value
        if metric is not None or (self.checkpointer.saved_step() or self._resumed) < step:
            self.save(metric, final=True)
        if "test" in self._corpus.texts:
            with self.trainer.averaged():
                self.report.test = self._evaluate("test").perplexity
                log.get_logger().info("test perplexity %.4f", self.report.test)
                if self._by_bleu:
                    self.report.test_bleu = self._score("test")

    def _validate(self, *, loss: bool, bleu: bool) -> float | None:
        """Validates; returns what decides which model is the best, if that was measured."""
        progress, step = self._progress, self.trainer.step
        measured: dict[str, float] = {}  # by which of them is the best
        with self.trainer.averaged():
            if loss:
                tally = self._evaluate("valid")
                log.get_logger().info("step %d: validation loss %.4f, perplexity %.4f", step, tally.loss, tally.perplexity)
                measured["min"] = self.report.valid[step] = tally.perplexity
                progress.validated = step
            if bleu:
                measured["max"] = self.report.bleu[step] = self._score("valid")
                progress.scored = step
        if (plateau := self.trainer.plateau) is not None and plateau.best_is in measured:
            plateau.update(measured[plateau.best_is])
        deciding = measured.get("max" if self._by_bleu else "min")
        if deciding is not None:
            self._take_back_lost_best()
            self._judged = _Judged(step, deciding, progress.best)
            progress.judge(deciding, larger_is_better=self._by_bleu)
            progress.judged_by = self._judged_by
        return deciding

    def _take_back_lost_best(self) -> None:
        """A model whose checkpoint could not be written is not the best that there is: those after it are compared with the best before it."""
        judged = self._judged
        if judged is None or judged.step == self.trainer.step or self._progress.best == judged.best_before:
            return
        if self.checkpointer.saved_step() != judged.step:
            self._progress.best = judged.best_before
        self._judged = None

    def _score(self, split: str) -> float:
        """BLEU of a text; the translations are kept."""
        assert self._scorer is not None
        directory = self._start.valid_path or self._directory.path / "valid"
        name = f"{'trans' if split == 'valid' else split}.iter{self.trainer.step}.txt"
        bleu = self._scorer(self.trainer.model, split, directory / name)
        log.get_logger().info("step %d: %s BLEU %.2f", self.trainer.step, split, bleu)
        self.metrics.write(MetricsRow(step=self.trainer.step, epoch=self.epoch, split=split, bleu=bleu, lr=self.trainer.lr))
        return bleu

    def _evaluate(self, split: str) -> Tally:
        if split not in self._streams:
            self._streams[split] = PairStream(
                self._corpus.texts[split], self._corpus.digest, batch_size=self._training.valid_batch_size, shuffle=False
            )
        tally = evaluate(self.trainer.model, self._streams[split], precision=self._training.precision)
        self._record(split, tally)
        return tally

    def measure(self) -> dict[str, float]:
        """Records the training loss since the last time."""
        tally, lap_s = self.trainer.collect(), self.stopwatch.lap()
        tokens_per_s = self._tokens_timed / lap_s
        self.report.tokens_per_s.append(tokens_per_s)
        self.report.steps_per_s.append(self._steps_timed / lap_s)
        self._tokens_timed = self._steps_timed = 0
        self.report.train[self.trainer.step] = tally.perplexity
        self._record("train", tally, tokens_per_s=tokens_per_s)
        return {"perplexity": tally.perplexity, "lr": self.trainer.lr, "tokens/s": tokens_per_s}

    def _record(self, split: str, tally: Tally, *, tokens_per_s: float | None = None) -> None:
        row = MetricsRow(
            step=self.trainer.step, epoch=self.epoch, split=split, loss=tally.loss, perplexity=tally.perplexity, tokens=tally.tokens,
            tokens_per_s=tokens_per_s, lr=self.trainer.lr,
        )  # fmt: skip
        self.metrics.write(row)

    def save(self, metric: float | None = None, *, background: bool = True, final: bool = False) -> Path | None:
        """Writes a checkpoint; a best model whose own could not be written is forgotten first."""
        self._take_back_lost_best()
        return super().save(metric, background=background, final=final)


def keep_vocabularies(path: Path, vocabularies: Vocabularies, *, anew: bool = False) -> None:
    """Writes the vocabularies to `path`, or compares them with what a run that goes on has there, unless one begins `anew`. Collective.

    Raises:
        CheckpointMismatch: they differ.
    """

    def keep() -> None:
        if path.exists() and not anew:
            vocabularies.require_same(Vocabularies.read(path.parent), path)
        else:
            replace_file(path, vocabularies.to_json().encode())

    on_rank_zero(keep)
