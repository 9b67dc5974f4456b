"""The three texts as numbers, the same on every rank.

Rank 0 reads the files and everybody receives the tokens: only its machine needs the files, all ranks train on the same ones even if another
machine holds other files under the same name, and a text is read and encoded once, not once a rank.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hora import log
from hora.comm.collectives import broadcast
from hora.comm.session import session
from hora.errors import ConfigError
from hora.recipes.lm.config import DataConfig
from hora.recipes.lm.text import SPLITS, TextFiles, WordReader, locate
from hora.recipes.lm.vocabulary import UNKNOWN, Vocabulary
from hora.train.rank_zero import on_rank_zero


@dataclass(frozen=True)
class Corpus:
    """Vocabulary and tokens.

    Attributes:
        tokens: for `train`, `valid` and `test` the numbers of the words `[num_tokens]`, int32.
    """

    vocabulary: Vocabulary
    tokens: Mapping[str, Tensor]

    def lengths(self) -> dict[str, int]:
        """How many tokens each text has."""
        return {split: len(tokens) for split, tokens in self.tokens.items()}

    def digests(self) -> dict[str, str]:
        """What tells this corpus from another: a digest of the vocabulary and of each text."""
        texts = {split: hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest() for split, tokens in self.tokens.items()}
        return {"vocabulary": self.vocabulary.digest, **texts}


def load_corpus(data: DataConfig) -> Corpus:
    """Reads, numbers and spreads the texts. Collective.

    Raises:
        ConfigError: on all ranks; a text is missing, damaged or too short. Nothing has been trained.
    """
    read: list[Corpus] = []

    def read_and_measure() -> dict[str, int]:
        read.append(read_corpus(data))
        return {"words": len(_as_bytes(read[0].vocabulary)), **read[0].lengths()}

    sizes = on_rank_zero(read_and_measure)
    words = _spread(_as_bytes(read[0].vocabulary) if read else None, sizes["words"], torch.uint8)
    vocabulary = Vocabulary(tuple(words.cpu().numpy().tobytes().decode().split("\n")))
    return Corpus(vocabulary, {split: _spread(read[0].tokens[split] if read else None, sizes[split], torch.int32) for split in SPLITS})


def read_corpus(data: DataConfig) -> Corpus:
    """Reads the texts in this process, tokens on the CPU, and logs what was found in them.

    Raises:
        ConfigError: a text is missing, damaged or too short for the rows and windows of `data`.
    """
    files = locate(data.path)
    reader = WordReader(data.undecodable)
    vocabulary = Vocabulary.build(WordReader(data.undecodable).count(files.train), data.max_vocabulary)
    tokens = {split: _encode(reader, getattr(files, split), vocabulary) for split in SPLITS}
    if reader.undecodable_lines:
        log.get_logger().warning("%d lines are not UTF-8 (data.undecodable = %s)", reader.undecodable_lines, data.undecodable)
    _check_lengths(data, files, tokens)
    log.get_logger().info("%s words; %s", f"{len(vocabulary):,}", ", ".join(f"{split} {len(t):,} tokens" for split, t in tokens.items()))
    return Corpus(vocabulary, tokens)


def _encode(reader: WordReader, path: Path, vocabulary: Vocabulary) -> Tensor:
    index = vocabulary.index
    numbers = np.fromiter((index.get(word, -1) for word in reader.words(path)), dtype=np.int32)
    strange = numbers < 0
    if count := int(strange.sum()):
        share = count / len(numbers)
        log.get_logger().info(
            "%s: %s words (%.2f %%) are not in the vocabulary and become %s", path.name, f"{count:,}", 100 * share, UNKNOWN
        )
    numbers[strange] = index[UNKNOWN]
    return torch.from_numpy(numbers)


def _check_lengths(data: DataConfig, files: TextFiles, tokens: Mapping[str, Tensor]) -> None:
    needed = {"train": data.rows * (data.window + 1), "valid": data.rows + 1, "test": data.rows + 1}
    problems = [
        f"{getattr(files, split)} must have at least {needed[split]} tokens, but has {len(tokens[split])}"
        for split in SPLITS
        if len(tokens[split]) < needed[split]
    ]
    if problems:
        raise ConfigError(
            "; ".join(problems) + f" for data.rows = {data.rows} rows and windows of data.window = {data.window} tokens; decrease them, or "
            "give more text"
        )


def _as_bytes(vocabulary: Vocabulary) -> Tensor:
    # No word holds white space.
    return torch.frombuffer(bytearray("\n".join(vocabulary.words).encode()), dtype=torch.uint8)


def _spread(values: Tensor | None, length: int, dtype: torch.dtype) -> Tensor:
    device = session().device
    return broadcast(torch.empty(length, dtype=dtype, device=device) if values is None else values.to(device))
