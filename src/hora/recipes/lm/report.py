"""What a run has come to."""

from dataclasses import dataclass, field

from hora.recipes.course import CourseReport


@dataclass
class Report(CourseReport):
    """What a run has come to, the same on every rank.

    Attributes:
        train: training perplexity of each epoch that this start of the run completed, by epoch; `valid` likewise.
        test: test perplexity, once training is done.
        tokens_per_s: training speed over all ranks, measured ten times an epoch, without validation and saving.
    """

    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    test: float | None = None
    tokens_per_s: list[float] = field(default_factory=list)
