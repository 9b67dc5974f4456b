"""Vocabularies: from a sentence to numbers and back. Words, parts of words by the merges of subword-nmt, or sentencepiece's.

A vocabulary is one JSON text with all that it needs, so that a run directory translates without the files that it was made of. Imports no
torch; sentencepiece is loaded when a vocabulary of its kind is used.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from hora.errors import CheckpointError, CheckpointMismatch, ConfigError
from hora.recipes.nmt.merges import Merges
from hora.recipes.nmt.symbols import BOS, EOS, PAD, SYMBOLS, UNK
from hora.recipes.vocabularies import FILE_NAME


class Vocabulary(Protocol):
    """Numbers of what a side of a translation is made of; the first ones are `symbols`."""

    def __len__(self) -> int:
        """How many numbers there are."""

    def encode(self, line: str) -> list[int]:
        """The numbers of a sentence, without what begins and ends it."""

    def encode_all(self, lines: Sequence[str]) -> list[list[int]]:
        """The numbers of many sentences."""

    def decode(self, numbers: Sequence[int]) -> str:
        """The sentence of `numbers`; up to EOS if there is one, and without the other symbols but UNK."""

    def to_plain(self) -> dict[str, Any]:
        """All of it as plain data."""


@dataclass(frozen=True)
class WordVocabulary:
    """Words between white space, or with `merges` their parts.

    Attributes:
        words: in the order of their numbers, after the symbols.
        merges: what makes parts of words, unless the texts are cut already.
        in_parts: whether parts are joined again.
    """

    words: tuple[str, ...]
    merges: Merges | None = None
    in_parts: bool = False

    @cached_property
    def index(self) -> dict[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words, start=len(SYMBOLS))}

    def __len__(self) -> int:
        return len(SYMBOLS) + len(self.words)

    def encode(self, line: str) -> list[int]:
        """See `Vocabulary`."""
        words = line.split()
        if self.merges is not None:
            words = [part for word in words for part in self.merges.split(word)]
        return [self.index.get(word, UNK) for word in words]

    def encode_all(self, lines: Sequence[str]) -> list[list[int]]:
        """See `Vocabulary`."""
        return [self.encode(line) for line in lines]

    def decode(self, numbers: Sequence[int]) -> str:
        """See `Vocabulary`."""
        words = " ".join(SYMBOLS[UNK] if number == UNK else self.words[number - len(SYMBOLS)] for number in shown(numbers))
        return Merges.join(words) if self.in_parts else words

    def to_plain(self) -> dict[str, Any]:
        """See `Vocabulary`."""
        merges = None if self.merges is None else list(map(list, self.merges.pairs))
        return {"kind": "words", "words": list(self.words), "merges": merges, "in_parts": self.in_parts}


@dataclass(frozen=True)
class PieceVocabulary:
    """The parts of a sentencepiece model; what it has of symbols of its own becomes ours.

    Attributes:
        model: the bytes of the model file.
    """

    model: bytes

    @cached_property
    def _processor(self) -> Any:
        return load_sentencepiece().SentencePieceProcessor(model_proto=self.model)

    @cached_property
    def _pieces(self) -> list[int]:
        """Its number of each of our numbers, after the symbols."""
        processor = self._processor
        own = range(processor.get_piece_size())
        return [piece for piece in own if not (processor.is_control(piece) or processor.is_unknown(piece) or processor.is_unused(piece))]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {piece: number for number, piece in enumerate(self._pieces, start=len(SYMBOLS))}

    def __len__(self) -> int:
        return len(SYMBOLS) + len(self._pieces)

    def encode(self, line: str) -> list[int]:
        """See `Vocabulary`."""
        return self.encode_all([line])[0]

    def encode_all(self, lines: Sequence[str]) -> list[list[int]]:
        """See `Vocabulary`."""
        numbers = self._numbers
        # One call for many lines lets sentencepiece use all cores.
        return [[numbers.get(piece, UNK) for piece in pieces] for pieces in self._processor.encode(list(lines))]

    def decode(self, numbers: Sequence[int]) -> str:
        """See `Vocabulary`."""
        unknown = self._processor.unk_id()
        return str(self._processor.decode([unknown if number == UNK else self._pieces[number - len(SYMBOLS)] for number in shown(numbers)]))

    def to_plain(self) -> dict[str, Any]:
        """See `Vocabulary`."""
        return {"kind": "sentencepiece", "model": base64.b64encode(self.model).decode()}


@dataclass(frozen=True)
class Vocabularies:
    """Those of both sides, which may be one."""

    source: Vocabulary
    target: Vocabulary

    def to_json(self) -> str:
        """The text of `vocab.json`."""
        sides = [self.source.to_plain(), self.target.to_plain()]
        kept = sides[:1] if sides[0] == sides[1] else sides
        return json.dumps({"format": 1, "digest": _digest(kept), "vocabularies": kept}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Vocabularies":
        """Reads what `to_json` wrote.

        Raises:
            CheckpointError: the text holds no vocabularies, or was changed since.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            kept = fields["vocabularies"]
            intact = fields["format"] == 1 and fields["digest"] == _digest(kept)
            sides = [_from_plain(side) for side in kept] if intact else []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the vocabulary file cannot be read: {error!r}; build it anew in a new run directory") from error
        if not intact:
            raise CheckpointError("the vocabulary file does not have the digest that stands in it; it was changed or damaged")
        return cls(sides[0], sides[-1])

    @classmethod
    def read(cls, directory: Path) -> "Vocabularies":
        """The vocabularies of the run in `directory`.

        Raises:
            CheckpointError: there are none, or they are damaged.
        """
        try:
            text = (directory / FILE_NAME).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{directory / FILE_NAME} must hold the vocabularies of the run, but cannot be read: {error}") from error
        return cls.from_json(text)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of both: equal digests, equal numbers."""
        return _digest([self.source.to_plain(), self.target.to_plain()])

    @property
    def shared(self) -> bool:
        """Whether both sides have the same."""
        return self.source is self.target or self.source.to_plain() == self.target.to_plain()

    def require_same(self, other: "Vocabularies", place: Path) -> None:
        """Compares with what a run that goes on has at `place`.

        Raises:
            CheckpointMismatch: they differ.
        """
        if self.digest != other.digest:
            raise CheckpointMismatch(
                f"the vocabularies must be those of {place}, but are others now; give the same texts and data_configs.vocabularies, or begin anew "
                "in another run directory"
            )


def shown(numbers: Iterable[int]) -> list[int]:
    """What is to be read of a sentence: nothing from EOS on, and neither PAD nor BOS."""
    found: list[int] = []
    for number in numbers:
        if number == EOS:
            break
        if number not in (PAD, BOS):
            found.append(int(number))
    return found


def load_sentencepiece() -> Any:
    """The module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError("vocabularies of type bpe need sentencepiece (or `codes`): pip install 'hora[nmt]'") from error
    return sentencepiece


def _from_plain(side: Mapping[str, Any]) -> Vocabulary:
    if side["kind"] == "sentencepiece":
        return PieceVocabulary(base64.b64decode(side["model"]))
    merges = side["merges"]
    pairs = None if merges is None else Merges(tuple((left, right) for left, right in merges))
    return WordVocabulary(tuple(side["words"]), pairs, side["in_parts"])


def _digest(sides: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(list(sides), ensure_ascii=False, sort_keys=True).encode()).hexdigest()
