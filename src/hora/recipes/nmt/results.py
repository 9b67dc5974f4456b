"""What a translation run has come to as rows for a file of measurements."""

from typing import Any

from hora.recipes.nmt.report import Report
from hora.recipes.rows import rows_of


def result_rows(name: str, report: Report, command: str) -> list[dict[str, Any]]:
    """One row each for the perplexities, BLEU and the speed of this start of the run; the samples of a validation are the validations."""
    found = {
        ("training perplexity", "perplexity"): list(report.train.values()),
        ("validation perplexity", "perplexity"): list(report.valid.values()),
        ("validation BLEU", "BLEU"): list(report.bleu.values()),
        ("test perplexity", "perplexity"): [] if report.test is None else [report.test],
        ("test BLEU", "BLEU"): [] if report.test_bleu is None else [report.test_bleu],
        ("training speed", "tokens/s"): report.tokens_per_s,
        ("updates", "steps/s"): report.steps_per_s,
    }
    return rows_of(f"nmt/{name}", found, command)
