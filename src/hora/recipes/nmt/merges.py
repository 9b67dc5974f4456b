"""Byte pair encoding as subword-nmt writes it: a file of merges, and parts that end in `@@` but for the last of a word.

Sennrich, Haddow and Birch, *Neural Machine Translation of Rare Words with Subword Units* (arXiv:1508.07909). Standard library only.
"""

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from hora.errors import ConfigError

_END: Final = "</w>"
_GOES_ON: Final = "@@"


@dataclass(frozen=True)
class Merges:
    """Pairs of parts to be joined, the first ones first."""

    pairs: tuple[tuple[str, str], ...]
    _known: dict[str, list[str]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def parse(cls, text: str, name: str) -> "Merges":
        """Reads the merges in `text`, of a file called `name`.

        Raises:
            ConfigError: it is no file of merges, or of a version that puts the end of words elsewhere.
        """
        lines = text.split("\n")
        first = 0
        if lines[0].startswith("#version:"):
            first = 1
            if lines[0].split(":")[1].strip() != "0.2":
                raise ConfigError(f"{name}:1: merges must be of version 0.2, but are of {lines[0].split(':')[1].strip()}; learn them anew")
        pairs = []
        for number, line in enumerate(lines[first:], start=first + 1):
            parts = line.strip("\r ").split(" ")
            if len(parts) == 2:
                pairs.append((parts[0], parts[1]))
            elif line.strip():
                raise ConfigError(f"{name}:{number}: a merge must be two parts with a space between, but is {line[:60]!r}")
        if not pairs:
            raise ConfigError(f"{name} must hold merges, but is empty")
        return cls(tuple(pairs))

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        ranks: dict[tuple[str, str], int] = {}
        for rank, pair in enumerate(self.pairs):
            ranks.setdefault(pair, rank)
        return ranks

    def split(self, word: str) -> list[str]:
        """The parts of `word`."""
        if word not in self._known:
            self._known[word] = self._split(word)
        return self._known[word]

    def _split(self, word: str) -> list[str]:
        parts = [*word[:-1], word[-1] + _END]
        ranks, none = self._ranks, len(self.pairs)
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: ranks.get(pair, none))
            if best not in ranks:
                break
            joined: list[str] = []
            for part in parts:
                if joined and joined[-1] == best[0] and part == best[1]:
                    joined[-1] += part
                else:
                    joined.append(part)
            parts = joined
        *others, last = parts
        last = last.removesuffix(_END)
        return [part + _GOES_ON for part in others] + ([last] if last else [])

    @staticmethod
    def join(parts: str) -> str:
        """Words again, of parts with spaces between."""
        return parts.replace(f"{_GOES_ON} ", "").removesuffix(_GOES_ON)
