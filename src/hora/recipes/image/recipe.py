"""Trains an image classifier on any number of ranks: the whole run, from the configuration to the last accuracy.

Every rank calls `train` after `hora.init()`. What a step does is in `trainer`, what an accuracy is in `evaluation`.
"""

from pathlib import Path

from hora import log
from hora.comm.session import session
from hora.data.steps import Step
from hora.errors import ConfigError
from hora.recipes.course import EpochCourse
from hora.recipes.image.config import ImageConfig
from hora.recipes.image.data import SeededStep, load_images
from hora.recipes.image.report import Report
from hora.recipes.image.scores import Score
from hora.recipes.image.trainer import Trainer
from hora.recipes.sameness import require_mode
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.config import dump_config
from hora.train.metrics import MetricsRow
from hora.train.precision import float32_products
from hora.train.preemption import Preemption
from hora.train.run_directory import RunDirectory
from hora.train.weights import load_weights


def train(
    config: ImageConfig, path: Path, *, resume: bool = False, init_from: Path | None = None, allow_torch_file: bool = False
) -> Report:
    """Trains as `config` says and leaves everything in the run directory `path`. Collective.

    Args:
        config: of a run that is resumed: the same, but for what may change.
        path: made if it is not there.
        resume: go on from the latest checkpoint in `path`.
        init_from: weights to begin with, as `hora.train.weights.load_weights` reads them.
        allow_torch_file: whether those may be a file of `torch.save`.

    Raises:
        ConfigError: the configuration, the images or the run directory are not as they must be; before the first step.
        CheckpointError: there is nothing to resume from, or it does not fit; or another start of the run, or another job, writes checkpoints here.
        CheckpointUnwritten: the disk refused the last checkpoint of the run, or too many in a row; those before it are untouched.
        NonFiniteGradient, NonFiniteLoss: training diverged.
    """
    require_mode(config.logical_ranks if config.exact else None)
    with Preemption() as preemption:
        trainer = Trainer(config, load_images(config.data, config.seed))
        # The directory is claimed once all is well with what the user gave, so that a mistake leaves none behind.
        restarted = session().generation > 0
        with RunDirectory(path, config=dump_config(config), resume=resume, restarted=restarted) as directory:
            run = _Run(config, trainer, directory, preemption)
            run.begin(resume=resume, init_from=init_from, allow_torch_file=allow_torch_file)
            _say_plan(config, trainer)
            metrics = directory.open_metrics(after_step=trainer.step, tensorboard=config.tensorboard)
            with metrics as run.metrics, float32_products(tf32=config.tf32), run.checkpointer:
                run.go()
            directory.draw_curve(value="top1")
            return run.report


def evaluate(config: ImageConfig, *, run_dir: Path | None = None, init_from: Path | None = None, allow_torch_file: bool = False) -> Score:
    """Loss and accuracy of the latest checkpoint of a run, or of weights from elsewhere, on the test images. Collective.

    Nothing is trained, and nothing written into `run_dir`.

    Raises:
        ConfigError: as of `train`; or not one of `run_dir` and `init_from` is given.
        CheckpointError: there is no checkpoint, or it does not fit.
    """
    if (run_dir is None) == (init_from is None):
        raise ConfigError(
            "what is evaluated is the latest checkpoint of a run, or weights from elsewhere: give one of --run-dir and --init-from"
        )
    require_mode(config.logical_ranks if config.exact else None)
    trainer = Trainer(config, load_images(config.data, config.seed))
    if run_dir is not None:
        restored = Checkpointer(run_dir / "checkpoints").load()
        trainer.restore_model(restored.state)
        log.get_logger().info("evaluating %s", restored.path)
    elif init_from is not None:
        load_weights(init_from, trainer.model, allow_torch_file=allow_torch_file, averaged=True)
    with float32_products(tf32=config.tf32):
        score = trainer.evaluate()
    log.get_logger().info("test loss %.4f, accuracy %.4f, among five %.4f", score.loss, score.top1, score.top5)
    return score


def _say_plan(config: ImageConfig, trainer: Trainer) -> None:
    if session().rank:
        return
    size, ranks = config.data.global_batch_size, session().world_size
    log.get_logger().info(
        "%s parameters; a global batch of %d images over %d ranks, whatever their number; learning rate %g (optimizer.lr %g, rule %s)",
        f"{sum(parameter.numel() for parameter in trainer.model.parameters()):,}", size, ranks, config.lr, config.optimizer.lr,
        config.optimizer.lr_rule,
    )  # fmt: skip


class _Run(EpochCourse):
    """The course of a run, with accuracies."""

    report: Report

    def __init__(self, config: ImageConfig, trainer: Trainer, directory: RunDirectory, preemption: Preemption) -> None:
        super().__init__(trainer, trainer.loader, config.checkpoint, directory, preemption, "max", epochs=config.epochs)
        self.trainer = trainer
        self.report = Report()
        self._images_timed = 0

    def update(self, step: Step | SeededStep) -> None:
        """Trains on one global batch."""
        self._images_timed += self.trainer.update(step)

    def measure(self) -> dict[str, float]:
        """Records training loss and accuracy since the last time."""
        score = self.trainer.collect()
        images_per_s = self._images_timed / self.stopwatch.lap()
        self._images_timed = 0
        self.report.images_per_s.append(images_per_s)
        self._record("train", score, images_per_s=images_per_s)
        return {"loss": score.loss, "top1": score.top1, "lr": self.trainer.lr, "images/s": images_per_s}

    def close_epoch(self) -> None:
        """Evaluates and saves."""
        epoch = self.epoch
        train = self.report.train[epoch] = self.trainer.epoch_score
        held_out = ""
        if self.trainer.holds_out:
            valid = self.report.valid[epoch] = self.trainer.evaluate("valid")
            self._record("valid", valid)
            held_out = f"held-out images loss {valid.loss:.4f}, accuracy {valid.top1:.4f}; "
        test = self.report.test[epoch] = self.trainer.evaluate()
        self._record("test", test)
        self.save_epoch(self.report.valid.get(epoch, test).top1)
        log.get_logger().info(
            "epoch %d/%d: training loss %.4f, accuracy %.4f; %stest loss %.4f, accuracy %.4f, among five %.4f",
            epoch + 1, self._epochs, train.loss, train.top1, held_out, test.loss, test.top1, test.top5,
        )  # fmt: skip

    def _record(self, split: str, score: Score, *, images_per_s: float | None = None) -> None:
        row = MetricsRow(
            step=self.trainer.step, epoch=self.epoch, split=split, loss=score.loss, tokens=score.tally.tokens, tokens_per_s=images_per_s,
            lr=self.trainer.lr, top1=score.top1, top5=score.top5,
        )  # fmt: skip
        self.metrics.write(row)
