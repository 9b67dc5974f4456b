"""Learning rates over time: pure functions that give the factor on the optimizer's own rate.

A function of the step or epoch alone has no state to save. They fit `torch.optim.lr_scheduler.LambdaLR` through `functools.partial`.
"""

import math


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
