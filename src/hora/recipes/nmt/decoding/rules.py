"""What beam search looks for. Pure; imports no torch."""

import math
from dataclasses import dataclass
from typing import Final

from hora.errors import ConfigError

MORE_SYMBOLS: Final = 10
"""By so many a translation may be longer than `max_ratio` times its source."""


@dataclass(frozen=True)
class Rules:
    """How translations are found and compared.

    A hypothesis of `n` symbols, the end counted in, whose logarithms of probability sum to `s`, has the score `s / ((5 + n) / 6) ** alpha` (Wu et
    al., arXiv:1609.08144). `alpha` 0 leaves the plain sum; above 0 long translations gain, below 0 they lose.

    In each step the `2 * beam_size` likeliest continuations of a sentence's hypotheses are looked at. Of the first `beam_size` of them those that
    end are finished; the `beam_size` likeliest of those that do not end live on. A translation has at most `max_steps` symbols, and of a source of
    `m` symbols, its end counted in, at most `max_ratio * m + 10`: then the first `beam_size` continuations are finished as they are. The `keep_n`
    finished ones with the best scores are the result. PAD and BOS are never chosen.

    The search stops as soon as nothing that lives could still be among those: sums only fall, so the score of a hypothesis cannot rise above its sum
    under the most favourable of the lengths that are left. No result depends on when it stops.
    """

    beam_size: int = 5
    alpha: float = 0.0
    max_steps: int = 150
    keep_n: int = 1
    max_ratio: float = 3.0

    def __post_init__(self) -> None:
        if self.beam_size < 1 or self.max_steps < 1:
            raise ConfigError(f"beam_size and max_steps must be at least 1, but are {self.beam_size} and {self.max_steps}")
        if not math.isfinite(self.alpha):
            raise ConfigError(f"alpha must be a finite number, but is {self.alpha}")
        if not 0 <= self.max_ratio < math.inf:
            raise ConfigError(f"max_ratio must be a number of at least 0, but is {self.max_ratio}")
        if not 1 <= self.keep_n <= self.beam_size:
            raise ConfigError(
                f"keep_n must be from 1 to beam_size = {self.beam_size}, but is {self.keep_n}; search with a larger beam for more"
            )

    def limit(self, source_length: int) -> int:
        """Most symbols of a translation of a source of `source_length` symbols, its end counted in."""
        return int(min(self.max_steps, self.max_ratio * source_length + MORE_SYMBOLS))

    def penalty(self, length: int) -> float:
        """What the sum of a hypothesis of `length` symbols is divided by."""
        return float(((5 + length) / 6) ** self.alpha)


@dataclass(frozen=True)
class Hypothesis:
    """A translation found.

    Attributes:
        symbols: without the end.
        score: as `Rules` says.
    """

    symbols: list[int]
    score: float
