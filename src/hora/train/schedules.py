"""Learning rates over time: pure functions that give the factor on the optimizer's own rate, and one object that looks at validations.

A function of the step or epoch alone has no state to save. They fit `torch.optim.lr_scheduler.LambdaLR` through `functools.partial`.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal


def decay_after_epoch(epoch: int, *, decay: float, last_full_epoch: int) -> float:
    """`decay ** max(epoch - last_full_epoch, 0)`: the full rate up to and with `last_full_epoch`, then less with each epoch.

    Epochs count from 0. Zaremba, Sutskever and Vinyals, *Recurrent Neural Network Regularization* (arXiv:1409.2329).
    """
    return float(decay ** max(epoch - last_full_epoch, 0))


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final_factor: float = 0.0) -> float:
    """Up in a line over `warmup_steps`, then along half a cosine down to `final_factor`, reached at step `total_steps - 1` and kept.

    Steps count from 0; the first one has the factor `1 / (warmup_steps + 1)`, so that it is not lost.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1), 1.0)
    return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * progress))


def noam(step: int, *, d_model: int, warmup_steps: int) -> float:
    """`10 * d_model ** -0.5 * min(n ** -0.5, n * warmup_steps ** -1.5)` for `n = step + 1`, as NJUNMT-pytorch has it.

    Vaswani et al., *Attention Is All You Need* (arXiv:1706.03762), times ten: a rate of 0.1 is theirs.
    """
    number = step + 1
    rising = number * warmup_steps**-1.5 if warmup_steps else math.inf
    return float(10 * d_model**-0.5 * min(number**-0.5, rising))


def warmup_isqrt(step: int, *, warmup_steps: int, decay_steps: int | None, init_factor: float = 0.0) -> float:
    """Up in a line from `init_factor` over `warmup_steps`, full up to `decay_steps`, then falling as the root of the number of steps.

    With `decay_steps` None it stays full.
    """
    number = step + 1
    if number < warmup_steps:
        return init_factor + (1 - init_factor) * step / (warmup_steps - 1)
    return 1.0 if decay_steps is None else min(1.0, math.sqrt(decay_steps / number))


def linear_decay(step: int, *, decay_steps: int, final_factor: float = 0.0) -> float:
    """Down in a line from 1 to `final_factor`, reached after `decay_steps` and kept."""
    return final_factor + (1 - final_factor) * max(0.0, 1 - step / decay_steps)


class Plateau:
    """A factor that falls when validations get no better: times `scale` after each `patience` + 1 of them in a row.

    Args:
        patience: how many may pass.
        scale: below 1.
        best: whether a small (`min`) or a large (`max`) value is good.
        final_factor: it falls no lower.
    """

    def __init__(self, *, patience: int, scale: float, best: Literal["min", "max"] = "min", final_factor: float = 0.0) -> None:
        self.factor = 1.0
        self._patience, self._scale, self._final_factor = patience, scale, final_factor
        self.best_is = best
        self._sign = 1.0 if best == "min" else -1.0
        self._best: float | None = None
        self._num_bad = 0

    def update(self, value: float) -> None:
        """Takes the value of a validation."""
        if self._best is None or self._sign * value < self._sign * self._best:
            self._best, self._num_bad = value, 0
            return
        self._num_bad += 1
        if self._num_bad > self._patience:
            self.factor, self._num_bad = max(self.factor * self._scale, self._final_factor), 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"factor": self.factor, "best": self._best, "num_bad": self._num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self.factor, self._best, self._num_bad = state["factor"], state["best"], state["num_bad"]
