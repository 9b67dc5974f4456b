"""What a run has come to."""

from dataclasses import dataclass, field

from hora.recipes.course import CourseReport
from hora.recipes.image.scores import Score


@dataclass
class Report(CourseReport):
    """What a run has come to, the same on every rank.

    Attributes:
        train: training loss and accuracy of each epoch that this start of the run completed, by epoch.
        test: likewise of the test images, after the epoch; `valid` of those that are held out, if any are.
        images_per_s: training speed over all ranks, measured ten times an epoch, without evaluation and saving.
    """

    train: dict[int, Score] = field(default_factory=dict)
    test: dict[int, Score] = field(default_factory=dict)
    valid: dict[int, Score] = field(default_factory=dict)
    images_per_s: list[float] = field(default_factory=list)
