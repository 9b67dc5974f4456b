"""What is due after a step, as a pure function of the step: log lines, validations, saves. Imports no torch."""

from dataclasses import dataclass

from hora.recipes.nmt.config import TrainingConfig

_MOST_EPOCHS_OF_WARMUP = 50
"""A `bleu_valid_warmup` up to this counts epochs, a larger one steps, as in NJUNMT-pytorch."""


@dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    display: bool = False
    loss: bool = False
    bleu: bool = False
    save: bool = False


def due_after(training: TrainingConfig, *, step: int, epoch: int, ends_epoch: bool, debug: bool = False) -> Due:
    """What is due when `step` updates are done, the last of them in `epoch` (from 0), at whose end it may be. `debug`: everything."""
    warm = step > training.bleu_valid_warmup if training.bleu_valid_warmup > _MOST_EPOCHS_OF_WARMUP else epoch >= training.bleu_valid_warmup
    return Due(
        display=debug or ends_epoch or _is_due(training.disp_freq, step),
        loss=debug or (ends_epoch if training.loss_valid_freq is None else _is_due(training.loss_valid_freq, step)),
        bleu=training.bleu_valid_freq > 0 and (debug or (warm and _is_due(training.bleu_valid_freq, step))),
        save=debug or _is_due(training.save_freq or 0, step),
    )


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@dataclass
class Progress:
    """How validations went: the best so far, and how many since were no better.

    Attributes:
        settled: the last step after which all that was due was done.
        validated: the last step whose loss was measured; `scored`: whose BLEU was.
        judged_by: what `best` is: bleu or loss.
    """

    best: float | None = None
    num_bad: int = 0
    settled: int = 0
    validated: int = 0
    scored: int = 0
    judged_by: str = ""

    def judge(self, value: float, *, larger_is_better: bool) -> None:
        """Takes the value of a validation."""
        better = self.best is None or (value > self.best if larger_is_better else value < self.best)
        self.best, self.num_bad = (value, 0) if better else (self.best, self.num_bad + 1)
