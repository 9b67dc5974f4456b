"""What a run has come to. Imports no torch."""

from dataclasses import dataclass, field


@dataclass
class Report:
    """What a run has come to, the same on every rank.

    Attributes:
        preempted: the name of the signal that ended it before it was done; empty otherwise.
        train: training perplexity of each epoch that this start of the run completed, by epoch; `valid` likewise.
        test: test perplexity, once training is done.
        epoch_s: seconds of training of those epochs that it began and completed, without validation and saving.
        tokens_per_s: training speed over all ranks, measured ten times an epoch, likewise without validation and saving.
    """

    preempted: str = ""
    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    test: float | None = None
    epoch_s: dict[int, float] = field(default_factory=dict)
    tokens_per_s: list[float] = field(default_factory=list)
