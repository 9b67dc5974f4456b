"""What a run has come to as rows for a file of measurements."""

from typing import Any

from hora.recipes.image.report import Report
from hora.recipes.rows import rows_of


def result_rows(name: str, report: Report, command: str) -> list[dict[str, Any]]:
    """One row each for the accuracies and the time of the epochs that this start of the run did, and for its speed.

    The samples of an accuracy are the epochs, its value is that of the last; the value of a time or a speed is the median.
    """
    found = {
        ("training accuracy", "share"): [score.top1 for score in report.train.values()],
        ("validation accuracy", "share"): [score.top1 for score in report.valid.values()],
        ("test accuracy", "share"): [score.top1 for score in report.test.values()],
        ("test accuracy among five", "share"): [score.top5 for score in report.test.values()],
        ("time per epoch", "s"): list(report.epoch_s.values()),
        ("training speed", "images/s"): report.images_per_s,
    }
    return rows_of(f"image/{name}", found, command)
