"""Parallel texts as lines: two files, plain or gzip, a sentence a line. Standard library only.

Lines end at a newline byte and nowhere else. A line that is not as it should be is told with its file and number, and dealt with by a
policy.
"""

import codecs
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, cast

from hora import log
from hora.errors import ConfigError
from hora.recipes.nmt.config import DataConfig, Policy

EXCERPT: Final = Path(__file__).parent / "excerpt"
"""Short sentence pairs of Tatoeba that come with Hora (CC BY 2.0 FR, see the files in it)."""

_EXCERPT_WORD: Final = "excerpt:"


def is_excerpt(name: str) -> bool:
    """Whether `name` stands for a file that comes with Hora."""
    return name.startswith(_EXCERPT_WORD)


def locate(name: str) -> Path:
    """The file that `name` stands for: a path, or `excerpt:NAME`."""
    return EXCERPT / name.removeprefix(_EXCERPT_WORD) if is_excerpt(name) else Path(name)


def texts_of(data: DataConfig) -> dict[str, tuple[str, str]]:
    """The names of the files of each text."""
    found = {"train": data.train_data, "valid": data.valid_data, "test": data.test_data}
    return {split: names for split, names in found.items() if names is not None}


def require_texts(names: Sequence[str]) -> None:
    """Looks whether the files are there.

    Raises:
        ConfigError: some are not, or are empty; all are named.
    """
    paths = [locate(name) for name in names]
    problems = [f"{path} is not there" for path in paths if not path.is_file()]
    problems += [f"{path} is empty" for path in paths if path.is_file() and not path.stat().st_size]
    if problems:
        raise ConfigError(f"texts must be files with a sentence a line, but {'; '.join(problems)}")


@dataclass
class Findings:
    """What was wrong with lines of one text, and how often; the first place of each is kept."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def note(self, what: str, place: str) -> None:
        """One more line."""
        self.counts[what] = self.counts.get(what, 0) + 1
        self.places.setdefault(what, place)

    def tell(self) -> None:
        """Logs them."""
        for what, count in self.counts.items():
            log.get_logger().warning("%d lines %s (the first is %s)", count, what, self.places[what])


_DONE: Final = {"skip": "and were left out, the pair with them", "replace": "and were mended"}


@dataclass(frozen=True)
class LineCheck:
    """Deals with a fault of lines by a policy.

    Attributes:
        key: what the policy is called in the configuration.
        policy: error ends, skip leaves the pair out, replace mends the line.
        findings: where it is counted.
    """

    key: str
    policy: Policy
    findings: Findings

    def met(self, place: str, fault: str) -> bool:
        """Counts a line; whether it is to be mended, not left out.

        Raises:
            ConfigError: the policy is error.
        """
        if self.policy == "error":
            raise ConfigError(f"{place}: {fault}; mend the file, or set data_configs.{self.key} to skip or replace")
        self.findings.note(f"break data_configs.{self.key} {_DONE[self.policy]}", place)
        return self.policy == "replace"


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a text, without the newline, and without the mark of UTF-8 that some editors put first.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with _open(path) as file:
            for number, line in enumerate(file):
                yield (line.removeprefix(codecs.BOM_UTF8) if number == 0 else line).removesuffix(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"the text {path} cannot be read: {error}") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))


def read_text(path: Path, check: LineCheck) -> Iterator[str | None]:
    """The lines of a text; None in the place of one that is left out because it is not UTF-8."""
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            fault = f"a text must be UTF-8, but byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
            yield line.decode("utf-8", errors="replace") if check.met(f"{path}:{number}", fault) else None


def read_pairs(paths: Sequence[Path], check: LineCheck) -> Iterator[tuple[str | None, ...]]:
    """The lines of the two texts side by side.

    Raises:
        ConfigError: one has more lines than the other; or as of `read_text`.
    """
    try:
        yield from zip(*(read_text(path, check) for path in paths), strict=True)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        counts = " and ".join(f"{sum(1 for _ in read_lines(path)):,} ({path})" for path in paths)
        raise ConfigError(f"the two sides of a text must have as many lines, but have {counts}") from error
