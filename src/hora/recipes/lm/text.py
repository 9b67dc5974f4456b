"""Finds and reads the three texts of a language model: training, validation, test. Standard library only.

Lines end at a newline byte and nowhere else; words are what stands between white space; each line ends with the word `<eos>`.
"""

import codecs
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hora.errors import ConfigError
from hora.recipes.fetch import DATASETS, fetch
from hora.recipes.lm.vocabulary import END_OF_LINE

SPLITS: Final = ("train", "valid", "test")
EXCERPT: Final = Path(__file__).parent / "excerpt"
"""The excerpt of WikiText-2 that comes with Hora (CC BY-SA 3.0, see the files in it)."""

_PATTERNS: Final = ("{}.txt", "ptb.{}.txt", "wiki.{}.tokens")

Undecodable = Literal["error", "skip", "replace"]


@dataclass(frozen=True)
class TextFiles:
    """Paths of the three texts."""

    train: Path
    valid: Path
    test: Path

    @classmethod
    def find(cls, directory: Path) -> "TextFiles":
        """Looks for `train.txt`, `ptb.train.txt` or `wiki.train.tokens` in `directory`, and for `valid` and `test` likewise.

        Raises:
            ConfigError: the directory or a text is absent, empty or no file; all are named.
        """
        if not directory.is_dir():
            raise ConfigError(
                f"the data directory {directory} must exist, but there is none; give one with train.txt, valid.txt and test.txt"
            )
        found = {split: next((p for p in _candidates(directory, split) if p.is_file()), None) for split in SPLITS}
        missing = [" or ".join(path.name for path in _candidates(directory, split)) for split, path in found.items() if path is None]
        empty = [path.name for path in found.values() if path is not None and path.stat().st_size == 0]
        problems = [f"it lacks {names}" for names in missing] + [f"{name} is empty" for name in empty]
        if problems:
            raise ConfigError(
                f"the data directory {directory} must hold a training, a validation and a test text, but " + "; ".join(problems)
            )
        return cls(**{split: path for split, path in found.items() if path is not None})


def locate(path: str) -> TextFiles:
    """The texts that `path` stands for: a directory, a data set that is fetched by its name, or `excerpt`.

    Raises:
        ConfigError: there is none, or it cannot be had.
    """
    if not path:
        raise ConfigError(f"data.path must be a directory, `excerpt` or one of {', '.join(DATASETS)}, but is empty; give it with --data")
    if path == "excerpt":
        return TextFiles.find(EXCERPT)
    if path in DATASETS:
        return TextFiles.find(fetch(DATASETS[path]))
    return TextFiles.find(Path(path))


def _candidates(directory: Path, split: str) -> list[Path]:
    return [directory / pattern.format(split) for pattern in _PATTERNS]


class WordReader:
    """Reads the words of texts and counts the lines that were not UTF-8.

    Args:
        undecodable: what to do with such a line: end with an error, skip it, or put U+FFFD in place of the wrong bytes.
    """

    def __init__(self, undecodable: Undecodable = "error") -> None:
        self._undecodable = undecodable
        self.undecodable_lines = 0

    def words(self, path: Path) -> Iterator[str]:
        """The words of the text at `path`, with `<eos>` after each line; without the mark of UTF-8 that some editors put first.

        Raises:
            ConfigError: the file cannot be read, or a line is not UTF-8 and `undecodable` is "error"; names the file, line and byte.
        """
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    text = self._decode(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, f"{path}:{number}")
                    if text is not None:
                        yield from text.split()
                        yield END_OF_LINE
        except OSError as error:
            raise ConfigError(f"the text {path} cannot be read: {error.strerror}") from error

    def count(self, path: Path) -> Counter[str]:
        """How often each word stands in the text at `path`."""
        return Counter(self.words(path))

    def _decode(self, line: bytes, place: str) -> str | None:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            self.undecodable_lines += 1
            if self._undecodable == "error":
                raise ConfigError(
                    f"{place}: the text must be UTF-8, but byte {error.start + 1} of the line is 0x{line[error.start]:02x}; "
                    "convert the file, or set data.undecodable to skip or replace"
                ) from error
            return None if self._undecodable == "skip" else line.decode("utf-8", errors="replace")
