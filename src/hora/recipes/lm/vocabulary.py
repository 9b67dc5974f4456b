"""The words that a model knows and their numbers. Pure; imports no torch."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from hora.errors import CheckpointError

END_OF_LINE: Final = "<eos>"
UNKNOWN: Final = "<unk>"


@dataclass(frozen=True)
class Vocabulary:
    """Words in the order of their numbers: the most frequent first, equally frequent ones by their spelling."""

    words: tuple[str, ...]

    @classmethod
    def build(cls, counts: Counter[str], max_size: int | None = None) -> "Vocabulary":
        """Ranks the words of `counts` and keeps at most `max_size` of them.

        `<unk>` is always among them and counts for the words left out as well; in a text without it that keeps every word it is the last.
        """
        ranked = sorted((word for word in counts if word != UNKNOWN), key=lambda word: (-counts[word], word))
        kept = ranked if max_size is None else ranked[: max_size - 1]
        kept_counts = {word: counts[word] for word in kept}
        kept_counts[UNKNOWN] = counts.total() - sum(kept_counts.values())
        return cls(tuple(sorted(kept_counts, key=lambda word: (-kept_counts[word], word))))

    @cached_property
    def index(self) -> dict[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words)}

    @property
    def digest(self) -> str:
        """SHA-256 of the words in their order: equal digests, equal numbers."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    def to_json(self) -> str:
        """The text of `vocab.json`."""
        return json.dumps({"format": 1, "digest": self.digest, "words": self.words}, ensure_ascii=False, indent=0)

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Reads what `to_json` wrote.

        Raises:
            CheckpointError: the text is no vocabulary, or was changed since.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            vocabulary = cls(tuple(fields["words"]))
            intact = fields["format"] == 1 and fields["digest"] == vocabulary.digest
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the vocabulary file cannot be read: {error!r}; build it anew in a new run directory") from error
        if not intact:
            raise CheckpointError("the words of the vocabulary file do not have the digest that stands in it; it was changed or damaged")
        return vocabulary

    def __len__(self) -> int:
        return len(self.words)
