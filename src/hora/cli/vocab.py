"""`hora vocab`: counts the words of a text and writes a dictionary, as `build_dictionary` of NJUNMT-pytorch does."""

import json
import sys
from collections import Counter
from pathlib import Path

import click

from hora.errors import ConfigError
from hora.launch.report_words import require_writable
from hora.recipes.nmt.building import count_words, ranked
from hora.recipes.nmt.texts import Findings, LineCheck, read_text

_HELP = """Makes a dictionary of the words in texts, for `dict_path` of a vocabulary of `hora train nmt`.

\b
hora vocab --file train.en --num 30000 --saveto en.json
hora vocab --file train.de --freq 2 --saveto de.json

The dictionary is JSON of word to [id, frequency], the most frequent first. The share of the text that it covers is printed.
"""


@click.command("vocab", help=_HELP)
@click.option(
    "--file",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="FILE",
    help="A text, plain or .gz; may be repeated.",
)
@click.option("--num", type=click.IntRange(min=1), metavar="N", help="Keep the N most frequent words. [all]")
@click.option("--freq", type=click.IntRange(min=1), metavar="N", help="Keep the words that occur at least N times.")
@click.option("--char", is_flag=True, help="Count characters instead of words.")
@click.option("--saveto", type=click.Path(path_type=Path), metavar="FILE", help="Where the dictionary goes. [standard output]")
def command(files: tuple[Path, ...], num: int | None, freq: int | None, char: bool, saveto: Path | None) -> int:
    """Counts, cuts and writes."""
    if num is not None and freq is not None:
        raise ConfigError("--num and --freq both say how many words are kept; give one of them")
    if saveto is not None and saveto.exists() and any(path.exists() and path.samefile(saveto) for path in files):
        raise ConfigError(f"--saveto would write over {saveto}, which is a text that is read; give another file")
    require_writable("--saveto", saveto)
    counts = _count(files, char=char)
    kept = [word for word in ranked(counts) if counts[word] >= (freq or 1)][:num]
    if not kept:
        often = f" that occur {freq} times" if freq else ""
        raise ConfigError(f"{', '.join(map(str, files))}: a dictionary needs words, but there are none{often}")
    lines = [f"{json.dumps(word, ensure_ascii=False)}: [{number}, {counts[word]}]" for number, word in enumerate(kept)]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if saveto is None:
        sys.stdout.buffer.write(text.encode())  # as in a file, whatever the locale
        sys.stdout.buffer.flush()
    else:
        from hora.train.files import write_result

        write_result(saveto, text.encode())
    covered = sum(counts[word] for word in kept) / counts.total()
    what = "characters" if char else "words"
    click.echo(f"{len(kept):,} of {len(counts):,} {what} cover {covered:.2%} of the text ({counts.total():,})", err=True)
    return 0


def _count(files: tuple[Path, ...], *, char: bool) -> Counter[str]:
    check = LineCheck("undecodable", "error", Findings())
    lines = (line or "" for path in files for line in read_text(path, check))
    return count_words(" ".join("".join(line.split())) for line in lines) if char else count_words(lines)
