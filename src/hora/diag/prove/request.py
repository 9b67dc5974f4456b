"""What a user asked `hora prove` for, checked before anything is started. Loads no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hora.errors import ConfigError

DEFAULT_RANKS: Final = "1,2"
DEFAULT_STEPS: Final = 20

_PLACE = re.compile(r"\{(?:(\d+)\s*([/*])\s*)?ranks\}")


@dataclass(frozen=True)
class Request:
    """A script and how it is to be compared.

    Attributes:
        words: the script (or module) and its arguments, in which `{ranks}` and `{64/ranks}` stand for numbers.
        ranks: numbers of ranks; the first one is what the others are compared with.
        steps: optimizer steps to compare.
        exact: whether every bit must be the same.
        module: whether the script is a module.
        launcher: a command that starts the ranks in place of Hora's own.
        directory: where everything is left.
        timeout_s: of each run.

    Raises:
        ConfigError: everything that is wrong, at once.
    """

    words: tuple[str, ...]
    ranks: tuple[int, ...] = (1, 2)
    steps: int = DEFAULT_STEPS
    exact: bool = False
    module: bool = False
    launcher: str | None = None
    directory: Path = Path("prove")
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        problems = []
        if self.steps < 1:
            problems.append(f"--steps must be at least 1, but is {self.steps} instead")
        if not self.timeout_s > 0:
            problems.append(f"--timeout must be a positive number of seconds, but is {self.timeout_s:g} instead")
        if self.exact and self.launcher is not None:
            problems.append("--exact needs Hora's own launcher: leave --launcher out, or call hora.init(exact=True) in the script")
        for ranks in self.ranks:
            try:
                self.words_for(ranks)
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(dict.fromkeys(problems)))

    def words_for(self, ranks: int) -> list[str]:
        """The script and its arguments for a run on so many ranks.

        Raises:
            ConfigError: a quotient is no whole number.
        """
        return [with_ranks(word, ranks) for word in self.words]

    def launcher_for(self, ranks: int) -> str | None:
        """The launcher's command for a run on so many ranks."""
        return None if self.launcher is None else with_ranks(self.launcher, ranks)


def with_ranks(word: str, ranks: int) -> str:
    """`word` with `{ranks}`, quotients such as `{64/ranks}` and products such as `{64*ranks}` worked out.

    Raises:
        ConfigError: a quotient is no whole number from 1.
    """

    def number(place: re.Match[str]) -> str:
        if place[1] is None:
            return str(ranks)
        if place[2] == "*":
            return str(int(place[1]) * ranks)
        quotient, rest = divmod(int(place[1]), ranks)
        if rest or not quotient:
            raise ConfigError(
                f"{place[0]} must be a whole number for each number of ranks, but {place[1]}/{ranks} is none; choose another number"
            )
        return str(quotient)

    return _PLACE.sub(number, word)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks from `1,2,4`.

    Raises:
        ConfigError: it does not read so, or names fewer than two numbers, or one twice.
    """
    parts = [part.strip() for part in text.split(",")]
    ranks = tuple(int(part) for part in parts if part.isdecimal() and part.isascii())
    if len(ranks) != len(parts) or 0 in ranks or len(set(ranks)) < max(2, len(ranks)):
        raise ConfigError(
            f"--ranks must be two different numbers or more, such as 1,2,4 (the first is compared with), but is {text!r} instead"
        )
    return ranks


def describe(words: Sequence[str]) -> str:
    """The script for a title."""
    return " ".join(words)
