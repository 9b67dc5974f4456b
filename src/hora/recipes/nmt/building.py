"""Makes vocabularies of what the configuration names: files of words, merges or sentencepiece models, or the training text. Imports no torch."""

import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hora import log
from hora.errors import ConfigError
from hora.recipes.nmt.config import DataConfig, VocabularyConfig
from hora.recipes.nmt.merges import Merges
from hora.recipes.nmt.symbols import BOS, EOS, PAD, SYMBOLS, UNK
from hora.recipes.nmt.texts import Findings, LineCheck, locate, read_text
from hora.recipes.nmt.vocabulary import PieceVocabulary, Vocabularies, Vocabulary, WordVocabulary, load_sentencepiece

_MOST_LINES: Final = 2_000_000
"""Of a text from which sentencepiece learns: more take hours and change little."""
_PIECES: Final = 8000


def build_vocabularies(data: DataConfig) -> Vocabularies:
    """The vocabularies of both sides.

    Raises:
        ConfigError: a file is missing or damaged, or sentencepiece is not installed.
    """
    texts = [locate(name) for name in data.train_data]
    if len(data.vocabularies) == 1:
        shared = build_vocabulary(data.vocabularies[0], texts, data)
        return Vocabularies(shared, shared)
    source, target = (build_vocabulary(config, [text], data) for config, text in zip(data.vocabularies, texts, strict=True))
    return Vocabularies(source, target)


def build_vocabulary(config: VocabularyConfig, texts: Sequence[Path], data: DataConfig) -> Vocabulary:
    """One vocabulary, of its files or else of `texts`."""
    if config.type == "bpe" and not config.codes and not config.dict_path:
        model = _read(Path(config.sentencepiece), "a sentencepiece model") if config.sentencepiece else train_pieces(config, texts, data)
        return PieceVocabulary(_checked(model, config.sentencepiece))
    merges = Merges.parse(_read_text(Path(config.codes), "merges"), config.codes) if config.codes else None
    if config.dict_path:
        words = read_dictionary(Path(config.dict_path))
    else:
        words = ranked(count_words(_lines(texts, data), merges))
    limit = None if config.max_n_words == -1 else config.max_n_words - len(SYMBOLS)
    return WordVocabulary(tuple(words[:limit]), merges, in_parts=config.type == "bpe")


def _lines(texts: Sequence[Path], data: DataConfig) -> Iterator[str]:
    for text in texts:
        for line in read_text(text, LineCheck("undecodable", data.undecodable, Findings())):
            if line is not None:
                yield line


def count_words(lines: Iterator[str], merges: Merges | None = None) -> Counter[str]:
    """How often each word, or part of one, stands in `lines`."""
    counts = Counter(word for line in lines for word in line.split())
    if merges is None:
        return counts
    parts: Counter[str] = Counter()
    for word, count in counts.items():
        for part in merges.split(word):
            parts[part] += count
    return parts


def ranked(counts: Counter[str]) -> list[str]:
    """The most frequent first, equally frequent ones by their spelling."""
    return sorted((word for word in counts if word not in SYMBOLS), key=lambda word: (-counts[word], word))


def read_dictionary(path: Path) -> list[str]:
    """The words of a dictionary in the order of their numbers: JSON of word to number or to [number, frequency], or one word a line."""
    text = _read_text(path, "a dictionary")
    if path.suffix == ".json":
        try:
            numbers = {word: int(value[0] if isinstance(value, list) else value) for word, value in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path} must be JSON of word to number or to [number, frequency], but is not: {error}") from error
        words = sorted(numbers, key=lambda word: numbers[word])
    else:
        words = [line.split()[0] for line in text.split("\n") if line.split()]
    words = [word for word in dict.fromkeys(words) if word not in SYMBOLS]
    if not words:
        raise ConfigError(f"{path} must hold words, but is empty")
    return words


def train_pieces(config: VocabularyConfig, texts: Sequence[Path], data: DataConfig) -> bytes:
    """Learns a sentencepiece model by byte pair encoding."""
    size = _PIECES if config.max_n_words == -1 else config.max_n_words
    every = math.ceil(sum(1 for _ in _lines(texts, data)) / _MOST_LINES) or 1
    model = io.BytesIO()
    log.get_logger().info("learning %d parts of words from %s", size, ", ".join(map(str, texts)))
    options: dict[str, Any] = {"pad_id": PAD, "eos_id": EOS, "bos_id": BOS, "unk_id": UNK}
    try:
        load_sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=itertools.islice(_lines(texts, data), 0, None, every), model_writer=model, model_type="bpe", vocab_size=size,
            character_coverage=1.0, minloglevel=2, **options,
        )  # fmt: skip
    except RuntimeError as error:
        names = ", ".join(map(str, texts))
        raise ConfigError(f"sentencepiece cannot learn {size} parts from {names}: {error}; give another max_n_words") from error
    return model.getvalue()


def _checked(model: bytes, name: str | None) -> bytes:
    try:
        load_sentencepiece().SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ConfigError(f"{name or 'what was learnt'} must be a sentencepiece model, but is not: {error}") from error
    return model


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} must hold {what}, but cannot be read: {error.strerror}") from error


def _read_text(path: Path, what: str) -> str:
    try:
        return _read(path, what).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8, but byte {error.start + 1} is not") from error
