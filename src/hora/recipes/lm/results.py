"""What a run has come to as rows for a file of measurements."""

from typing import Any

from hora.recipes.lm.report import Report
from hora.recipes.rows import rows_of


def result_rows(name: str, report: Report, command: str) -> list[dict[str, Any]]:
    """One row each for the perplexities and the time of the epochs that this start of the run did, and for its speed.

    The samples of a perplexity are the epochs, its value is that of the last; the value of a time or a speed is the median.
    """
    found = {
        ("training perplexity", "perplexity"): list(report.train.values()),
        ("validation perplexity", "perplexity"): list(report.valid.values()),
        ("test perplexity", "perplexity"): [] if report.test is None else [report.test],
        ("time per epoch", "s"): list(report.epoch_s.values()),
        ("training speed", "tokens/s"): report.tokens_per_s,
    }
    return rows_of(f"lm/{name}", found, command)
