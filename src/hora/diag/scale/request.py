"""What a user asked `hora scale` for, checked before anything is started. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path

from hora.diag.prove.request import with_ranks
from hora.errors import ConfigError

KINDS = ("strong", "weak")


@dataclass(frozen=True)
class Request:
    """A script and the numbers of ranks that it is to be run with.

    Attributes:
        words: the script (or module) and its arguments, in which `{ranks}`, `{64/ranks}` and `{64*ranks}` stand for numbers.
        ranks: numbers of ranks.
        kind: "strong": the global batch stays; "weak": that of a rank does.
        repeats: runs with each number of ranks, in turns.
        to: up to how many ranks it is predicted.
        module: whether the script is a module.
        directory: where logs and reports are left.
        timeout_s: of each run.

    Raises:
        ConfigError: everything that is wrong, at once.
    """

    words: tuple[str, ...]
    ranks: tuple[int, ...]
    kind: str
    repeats: int = 3
    to: int | None = None
    module: bool = False
    directory: Path = Path("scale")
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        problems = []
        if not self.timeout_s > 0:
            problems.append(f"--timeout must be a positive number of seconds, but is {self.timeout_s:g} instead")
        if self.to is not None and self.to <= max(self.ranks):
            problems.append(f"--to must be more ranks than are measured ({max(self.ranks)}), but is {self.to} instead")
        for ranks in self.ranks:
            try:
                self.words_for(ranks)
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(dict.fromkeys(problems)))

    def words_for(self, ranks: int) -> tuple[str, ...]:
        """The script and its arguments for a run on so many ranks.

        Raises:
            ConfigError: a quotient is no whole number.
        """
        return tuple(with_ranks(word, ranks) for word in self.words)
