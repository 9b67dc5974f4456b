"""Cuts the excerpt of WikiText-2 that ships with Hora: the first whole articles of each split, up to a budget of bytes.

    python tools/make_excerpt.py WIKITEXT_2_DIR src/hora/recipes/lm/excerpt

Writes `train.txt`, `valid.txt`, `test.txt` and `ATTRIBUTION.md`, always the same from the same text. `LICENSE.txt` beside them is the text
of the licence and is not written here.
"""

import re
import sys
from pathlib import Path

BUDGET_BYTES = {"train": 1_100_000, "valid": 130_000, "test": 130_000}
TITLE = re.compile(rb"^ = [^=].*[^=] = $")

ATTRIBUTION = """\
# Where this text comes from

The files `train.txt`, `valid.txt` and `test.txt` are the first whole articles of the same splits of WikiText-2 (word level, version 1) by
Stephen Merity, Caiming Xiong, James Bradbury and Richard Socher (*Pointer Sentinel Mixture Models*, arXiv:1609.07843), who made it from
articles of the English Wikipedia. Nothing in the articles was changed for this excerpt; WikiText-2 itself split the text into words and put
`<unk>` in place of rare ones.

Authors: the contributors of the Wikipedia articles named below; the history of `https://en.wikipedia.org/wiki/TITLE` names them one by one.

Licence: Creative Commons Attribution-ShareAlike 3.0 Unported, <https://creativecommons.org/licenses/by-sa/3.0/>, in full in `LICENSE.txt`.
The licence is that of these text files, not of the software around them.
"""


def articles(text: bytes) -> list[list[bytes]]:
    """The lines of each article; an article begins with its title, a heading of the first level between two blank lines."""
    lines = text.splitlines(keepends=True)
    starts = [
        number
        for number in range(1, len(lines) - 1)
        if TITLE.match(lines[number].rstrip(b"\n")) and not lines[number - 1].strip() and not lines[number + 1].strip()
    ]
    # The blank line before a title belongs to its article, as at the head of the file.
    return [lines[start - 1 : end - 1] for start, end in zip(starts, [*starts[1:], len(lines) + 1], strict=True)]


def first_whole(found: list[list[bytes]], budget_bytes: int) -> list[list[bytes]]:
    """The longest run of articles from the first that fits `budget_bytes`."""
    used = 0
    for count, lines in enumerate(found):
        used += sum(map(len, lines))
        if used > budget_bytes:
            return found[:count]
    return found


def main(source: Path, target: Path) -> None:
    """Writes the excerpt of the WikiText-2 in `source` into `target`."""
    attribution = [ATTRIBUTION]
    for split, budget_bytes in BUDGET_BYTES.items():
        kept = first_whole(articles((source / f"{split}.txt").read_bytes()), budget_bytes)
        (target / f"{split}.txt").write_bytes(b"".join(line for lines in kept for line in lines))
        titles = [lines[1].strip(b" =\n").decode() for lines in kept]
        attribution += [f"\n## Articles in `{split}.txt` ({len(titles)})\n\n", *(f"- {title}\n" for title in titles)]
    (target / "ATTRIBUTION.md").write_text("".join(attribution), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
