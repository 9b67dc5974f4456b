"""Trains a language model on any number of ranks: the whole run, from the configuration to the test perplexity.

Every rank calls `train` after `hora.init()`. What a step does is in `trainer`, what a perplexity is in `evaluation`.
"""

from pathlib import Path

from hora import log
from hora.comm.session import session
from hora.data.steps import Step
from hora.errors import CheckpointMismatch
from hora.recipes.course import EpochCourse
from hora.recipes.lm.config import LmConfig
from hora.recipes.lm.data import Corpus, load_corpus
from hora.recipes.lm.evaluation import evaluate
from hora.recipes.lm.report import Report
from hora.recipes.lm.trainer import Trainer
from hora.recipes.lm.vocabulary import Vocabulary
from hora.recipes.meter import Tally
from hora.recipes.sameness import require_mode
from hora.recipes.vocabularies import FILE_NAME
from hora.train.config import dump_config
from hora.train.files import replace_file
from hora.train.metrics import MetricsRow
from hora.train.precision import float32_products
from hora.train.preemption import Preemption
from hora.train.rank_zero import on_rank_zero
from hora.train.run_directory import RunDirectory


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
        CheckpointError: there is nothing to resume from, or it does not fit; or another start of the run, or another job, writes checkpoints here.
        CheckpointUnwritten: the disk refused the last checkpoint of the run, or too many in a row; those before it are untouched.
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
            keep_vocabulary(directory.path / FILE_NAME, corpus.vocabulary)
            run.begin(resume=resume, init_from=init_from, allow_torch_file=allow_torch_file)
            metrics = directory.open_metrics(after_step=trainer.step, tensorboard=config.tensorboard)
            with metrics as run.metrics, float32_products(tf32=config.tf32), run.checkpointer:
                if run.go():
                    run.test()
            directory.draw_curve()
            return run.report


class _Run(EpochCourse):
    """The course of a run, with perplexities."""

    report: Report

    def __init__(self, config: LmConfig, corpus: Corpus, trainer: Trainer, directory: RunDirectory, preemption: Preemption) -> None:
        super().__init__(trainer, trainer.stream, config.checkpoint, directory, preemption, "min", epochs=config.epochs)
        self._config, self._corpus, self.trainer = config, corpus, trainer
        self.report = Report()
        self._steps_timed = 0

    def update(self, step: Step) -> None:
        """Trains on one global batch."""
        self.trainer.update(step)
        self._steps_timed += 1

    def measure(self) -> dict[str, float]:
        """Records the training loss since the last time."""
        tally = self.trainer.collect()
        tokens_per_s = self._steps_timed * self.trainer.tokens_per_step / self.stopwatch.lap()
        self._steps_timed = 0
        self.report.tokens_per_s.append(tokens_per_s)
        self._record("train", tally, tokens_per_s=tokens_per_s)
        return {"perplexity": tally.perplexity, "lr": self.trainer.lr, "tokens/s": tokens_per_s}

    def close_epoch(self) -> None:
        """Evaluates and saves."""
        epoch = self.epoch
        self.report.train[epoch] = self.trainer.epoch_tally.perplexity
        self.report.valid[epoch] = self._evaluate("valid")
        self.save_epoch(self.report.valid[epoch])
        log.get_logger().info(
            "epoch %d/%d: training perplexity %.4f, validation perplexity %.4f",
            epoch + 1, self._config.epochs, self.report.train[epoch], self.report.valid[epoch],
        )  # fmt: skip

    def test(self) -> None:
        """Measures the test perplexity."""
        self.report.test = self._evaluate("test")
        log.get_logger().info("test perplexity %.4f", self.report.test)

    def _evaluate(self, split: str) -> float:
        tally = evaluate(self.trainer.model, self._corpus.tokens[split], self._config.data)
        self._record(split, tally)
        return tally.perplexity

    def _record(self, split: str, tally: Tally, *, tokens_per_s: float | None = None) -> None:
        row = MetricsRow(
            step=self.trainer.step, epoch=self.epoch, split=split, loss=tally.loss, perplexity=tally.perplexity, tokens=tally.tokens,
            tokens_per_s=tokens_per_s, lr=self.trainer.lr,
        )  # fmt: skip
        self.metrics.write(row)


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
