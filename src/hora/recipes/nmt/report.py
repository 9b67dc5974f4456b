"""What a run has come to."""

from dataclasses import dataclass, field

from hora.recipes.course import CourseReport


@dataclass
class Report(CourseReport):
    """What a run has come to, the same on every rank.

    Attributes:
        stopped_early: whether it ended because validations were no better.
        train: training perplexity between two lines of the log, by step; of this start of the run.
        valid: validation perplexity, by step; `bleu` likewise.
        test: test perplexity, once training is done, if there is a test text; `test_bleu` likewise.
        tokens_per_s: target tokens over all ranks, without validation and saving; `steps_per_s` likewise.
    """

    stopped_early: bool = False
    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    bleu: dict[int, float] = field(default_factory=dict)
    test: float | None = None
    test_bleu: float | None = None
    tokens_per_s: list[float] = field(default_factory=list)
    steps_per_s: list[float] = field(default_factory=list)
