"""Writes the figures of README.md and docs/ anew from the rows of benchmarks/results/, each with the digits and commas it has now."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURE = re.compile(r"(?P<mark><!--row (?P<file>\S+) (?P<filters>.+?)-->)(?P<text>.+?)<!--/row-->", re.DOTALL)


def measured(figure: re.Match[str]) -> str:
    """The figure, with the value of its row: that of a sample or of another field where the mark names one."""
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{figure['file']}.json").read_text(encoding="utf-8"))
    filters = dict(re.findall(r'(\w+)="([^"]*)"', figure["filters"]))
    sample, field = filters.pop("sample", None), filters.pop("field", "value")
    (row,) = (row for row in rows if all(str(row[key]) == value for key, value in filters.items()))
    value = row[field] if sample is None else row["samples"][int(sample)]
    if isinstance(value, str):  # a digest, by its beginning
        return f"{figure['mark']}{value[: len(figure['text'])]}<!--/row-->"
    digits = len(figure["text"].strip().partition(".")[2])
    comma = "," if "," in figure["text"] else ""
    return f"{figure['mark']}{value:{comma}.{digits}f}<!--/row-->"


def main() -> None:
    """Writes every page whose figures have changed."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = page.read_text(encoding="utf-8")
        after = FIGURE.sub(measured, before)
        if after != before:
            page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
