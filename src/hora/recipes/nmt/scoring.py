"""BLEU of the texts of a run, as its configuration wants it measured."""

from pathlib import Path

from hora import log
from hora.errors import ConfigError
from hora.recipes.nmt.config import DataConfig, NmtConfig
from hora.recipes.nmt.corpus import Corpus
from hora.recipes.nmt.decoding.bleu import Bleu, BleuOptions, load_sacrebleu, score_bleu
from hora.recipes.nmt.decoding.rules import Rules
from hora.recipes.nmt.merges import Merges
from hora.recipes.nmt.models import TranslationModel
from hora.recipes.nmt.texts import Findings, LineCheck, locate, read_text, texts_of
from hora.recipes.nmt.vocabulary import Vocabulary, WordVocabulary
from hora.train.files import is_of_the_disk, replace_file
from hora.train.rank_zero import on_rank_zero


class Scorer:
    """Translates the validation or the test text and scores that.

    Collective: all ranks make it and call it.

    Raises:
        ConfigError: on all ranks; sacrebleu is not installed, an argument for it is wrong, or a reference is missing or has another number of lines.
    """

    def __init__(self, config: NmtConfig, corpus: Corpus) -> None:
        how = config.training_configs.bleu_valid_configs
        self._config, self._corpus = config, corpus
        self._rules = Rules(how.beam_size, how.alpha, how.max_steps)
        self._options = BleuOptions.parse(how.sacrebleu_args)
        self._references: dict[str, list[list[str]]] = {}
        on_rank_zero(self._read)
        if how.postprocess:
            log.get_logger().warning(
                "bleu_valid_configs.postprocess has no effect: translations are scored as they are, give references likewise"
            )

    def __call__(self, model: TranslationModel, split: str, path: Path) -> float:
        """BLEU of `valid` or `test`, on all ranks alike; rank 0 writes the translations into `path`."""
        source, training = self._corpus.texts[split].source, self._config.training_configs
        found = score_bleu(
            model,
            [source[index].tolist() for index in range(len(source))],
            self._references.get(split, []),
            self._corpus.vocabularies.target,
            self._rules,
            batch_size=training.bleu_valid_batch_size,
            options=self._options,
            precision=training.precision,
        )
        on_rank_zero(lambda: _write(path, found))
        return found.score

    def _read(self) -> None:
        load_sacrebleu()
        for split in self._corpus.texts.keys() - {"train"}:
            count = len(self._corpus.texts[split])
            for name in reference_names(self._config.data_configs, split):
                lines = _lines(locate(name), self._corpus.vocabularies.target)
                if len(lines) != count:
                    raise ConfigError(f"a reference must have a line for each of the {count} sentences, but {name} has {len(lines)}")
                self._references.setdefault(split, []).append(lines)


def reference_names(data: DataConfig, split: str) -> list[str]:
    """The files that translations of a text are compared with."""
    if split == "valid" and data.bleu_valid_reference:
        prefix = data.bleu_valid_reference
        return [prefix] if data.num_refs == 1 else [f"{prefix}{number}" for number in range(data.num_refs)]
    return [texts_of(data)[split][1]]


def _lines(path: Path, vocabulary: Vocabulary) -> list[str]:
    check = LineCheck("undecodable", "replace", Findings())
    lines = [line or "" for line in read_text(path, check)]
    cut_already = isinstance(vocabulary, WordVocabulary) and vocabulary.in_parts and vocabulary.merges is None
    return list(map(Merges.join, lines)) if cut_already else lines


def _write(path: Path, found: Bleu) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(f"{line}\n" for line in found.translations).encode())
    except OSError as error:
        if not is_of_the_disk(error):
            raise
        log.get_logger().warning("translations could not be written into %s: %s; training goes on", path, error)
