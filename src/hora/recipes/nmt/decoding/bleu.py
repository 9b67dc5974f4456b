"""BLEU of a model's translations, made by all ranks and scored by sacrebleu on rank 0: one number that all ranks act on.

sacrebleu is loaded when a score is wanted.
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from hora import log
from hora.comm.session import session
from hora.errors import ConfigError
from hora.recipes.nmt.decoding.rules import Rules
from hora.recipes.nmt.decoding.search import BeamSearch
from hora.recipes.nmt.decoding.translating import translate_all
from hora.recipes.nmt.models.base import TranslationModel
from hora.recipes.nmt.vocabulary import Vocabulary
from hora.train.precision import PRECISIONS
from hora.train.rank_zero import on_rank_zero


@dataclass(frozen=True)
class Bleu:
    """A score and how it came about.

    Attributes:
        score: from 0 to 100.
        signature: what sacrebleu says of how it was computed.
        translations: one of each sentence, on rank 0; elsewhere none.
    """

    score: float
    signature: str
    translations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BleuOptions:
    """How sacrebleu compares: its `--lowercase`, `--tokenize`, `--smooth-method` and `--smooth-value`."""

    lowercase: bool = False
    tokenize: str | None = None
    smooth_method: str = "exp"
    smooth_value: float | None = None

    @classmethod
    def parse(cls, words: str) -> "BleuOptions":
        """Reads the words of sacrebleu's command line, such as `-lc --tokenize zh`.

        Raises:
            ConfigError: one is unknown.
        """
        parser = _Words(add_help=False, allow_abbrev=False)
        parser.add_argument("-lc", "--lowercase", action="store_true")
        parser.add_argument(
            "-tok", "--tokenize", choices=["13a", "none", "zh", "intl", "char", "ja-mecab", "ko-mecab", "spm", "flores101", "flores200"]
        )
        parser.add_argument("-s", "--smooth-method", choices=["exp", "floor", "add-k", "none"], default="exp")
        parser.add_argument("-sv", "--smooth-value", type=float)
        return cls(**vars(parser.parse_args(shlex.split(words))))


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"sacrebleu_args: {message}")


def load_sacrebleu() -> Any:
    """Its metrics.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import sacrebleu.metrics
    except ImportError as error:
        raise ConfigError("BLEU is computed by sacrebleu, which is not installed: pip install 'hora[nmt]'") from error
    return sacrebleu.metrics


def score_bleu(
    model: TranslationModel,
    sources: Sequence[Sequence[int]],
    references: Sequence[Sequence[str]],
    vocabulary: Vocabulary,
    rules: Rules,
    *,
    batch_size: int,
    options: BleuOptions | None = None,
    precision: str = "float32",
) -> Bleu:
    """Translates `sources` and scores that; the same on any number of ranks, and on all of them.

    Collective: all ranks call it with the same arguments. `model` is left as it is.

    Args:
        model: in training or not; a copy translates.
        sources: numbers of each sentence, without what begins and ends it.
        references: one or several translations of the whole text, each with a line a sentence; looked at on rank 0.
        vocabulary: of the target.
        rules: of the search.
        batch_size: sentences that are searched together.
        options: of sacrebleu.
        precision: what the copy computes in, one of `hora.train.precision.PRECISIONS`.

    Raises:
        ConfigError: on all ranks; sacrebleu is not installed, or a reference has another number of lines.
    """
    on_rank_zero(lambda: _require(references, len(sources)))
    copy = model.copy_to_decode(model.device, PRECISIONS[precision] or torch.float32)
    # Exact mode has other kernels, deterministic ones, and runs none of them in graphs.
    search = BeamSearch([copy], rules, capture=session().exact is None)
    found = translate_all(search, sources, vocabulary.decode, batch_size=batch_size)
    translations = [each[0].text for each in found or ()]
    told = on_rank_zero(lambda: _score(translations, references, options or BleuOptions()))
    log.get_logger().info("BLEU %.2f of %d sentences (%s)", told["score"], len(sources), told["signature"])
    return Bleu(told["score"], told["signature"], translations)


def _require(references: Sequence[Sequence[str]], sentences: int) -> None:
    load_sacrebleu()
    if not references or any(len(lines) != sentences for lines in references):
        found = ", ".join(str(len(lines)) for lines in references) or "none"
        raise ConfigError(f"each reference must have a line for each of the {sentences} sentences, but they have {found}")


def _score(translations: Sequence[str], references: Sequence[Sequence[str]], options: BleuOptions) -> dict[str, Any]:
    metric = load_sacrebleu().BLEU(**vars(options))
    score = float(metric.corpus_score(list(translations), [list(lines) for lines in references]).score)
    return {"score": score, "signature": str(metric.get_signature())}
