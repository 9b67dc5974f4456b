"""Translates the lines of a text on any number of ranks: the whole of `hora translate` but for its words and files."""

import codecs
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from hora import log
from hora.comm.objects import all_gather_object
from hora.comm.session import session
from hora.errors import ConfigError
from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.decoding.finding import find_all
from hora.recipes.nmt.decoding.rules import Rules
from hora.recipes.nmt.decoding.search import BeamSearch
from hora.recipes.nmt.decoding.translating import Translation, translate_all
from hora.recipes.nmt.models import build_model
from hora.recipes.nmt.models.base import TranslationModel
from hora.recipes.nmt.models.transformer import MAX_LEARNED_PLACES
from hora.recipes.nmt.texts import read_lines
from hora.recipes.nmt.vocabulary import Vocabularies, Vocabulary
from hora.train.precision import PRECISIONS
from hora.train.rank_zero import on_rank_zero
from hora.train.weights import load_weights

_BATCH_SIZES: Final = {"cuda": 512, "cpu": 64}


@dataclass(frozen=True)
class Job:
    """What is to be translated, and by what.

    Attributes:
        models: where trained models lie, as `find_trained` takes them; several translate together.
        config_path: of their run, if it does not lie with them.
        source: a text, plain or gzip; None: standard input of rank 0.
        rules: of the search.
        batch_size: sentences that are searched together; None: as many as suit the device.
        precision: one of `hora.train.precision.PRECISIONS`; None: bfloat16 on GPUs, float32 on CPUs.
    """

    models: list[Path]
    source: Path | None
    rules: Rules
    batch_size: int | None = None
    config_path: Path | None = None
    precision: str | None = None


@dataclass(frozen=True)
class Translated:
    """The lines, and the translations of each, the best first."""

    lines: list[str]
    translations: list[list[Translation]]


def translate(job: Job) -> Translated | None:
    """Translates; rank 0 gets the result, other ranks None. Collective.

    Raises:
        ConfigError, CheckpointError: on all ranks; a model or the text is not as it must be.
    """
    begun_s = time.perf_counter()
    models, vocabularies = load_models(job)
    lines: list[str] = on_rank_zero(lambda: read_source(job.source))
    sources = number_lines(lines, vocabularies.source)
    _require_places(models, max(map(len, sources), default=0) + 1, job.rules)
    ready_s = time.perf_counter()
    batch_size = job.batch_size or _BATCH_SIZES[session().device.type]
    found = translate_all(BeamSearch(models, job.rules), sources, vocabularies.target.decode, batch_size=batch_size)
    took_s = time.perf_counter() - ready_s
    log.get_logger().info(
        "%d sentences in %.1f s (%.1f sentences/s) after %.1f s to load", len(lines), took_s, len(lines) / took_s, ready_s - begun_s
    )
    return None if found is None else Translated(lines, found)


def load_models(job: Job) -> tuple[list[TranslationModel], Vocabularies]:
    """The models on this rank's device, ready to decode, and their vocabularies. Collective; rank 0 reads."""
    device = session().device

    def find() -> dict[str, Any]:
        found = find_all(job.models, job.config_path)
        models = [{"weights": str(each.weights), "config": asdict(each.config.model_configs)} for each in found]
        return {"models": models, "vocabularies": found[0].vocabularies.to_json()}

    told = on_rank_zero(find)
    vocabularies = Vocabularies.from_json(told["vocabularies"])
    precision = job.precision or ("bfloat16" if device.type == "cuda" else "float32")
    models = []
    for each in told["models"]:
        model = build_model(ModelConfig(**each["config"]), len(vocabularies.source), len(vocabularies.target), seed=0).to(device)
        load_weights(Path(each["weights"]), model, averaged=True)
        models.append(model.copy_to_decode(device, PRECISIONS[precision] or torch.float32))
        log.get_logger().info("translating with %s in %s", each["weights"], precision)
    return models, vocabularies


def read_source(path: Path | None) -> list[str]:
    """The lines of a text; of standard input if `path` is None.

    Raises:
        ConfigError: it cannot be read, or a line is not UTF-8.
    """
    if path is None:
        text_read = sys.stdin.buffer.read()
        lines = text_read.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n") if text_read else []
    else:
        lines = list(read_lines(path))
    text = []
    for number, line in enumerate(lines, start=1):
        try:
            text.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path or 'standard input'}:{number}: a text must be UTF-8, but byte {error.start + 1} of the line is not"
            ) from error
    return text


def number_lines(lines: Sequence[str], vocabulary: Vocabulary) -> list[list[int]]:
    """The numbers of all lines; each rank makes those of a part. Collective."""
    here = session()
    parts = all_gather_object(vocabulary.encode_all(lines[here.rank :: here.world_size]))
    numbered: list[list[int]] = [[] for _ in lines]
    for rank, part in enumerate(parts):
        numbered[rank :: here.world_size] = part
    return numbered


def _require_places(models: Sequence[TranslationModel], longest: int, rules: Rules) -> None:
    needed = max(longest, rules.max_steps)
    if needed > min(model.most_places for model in models):
        raise ConfigError(
            f"a model with learned places reads and writes up to {MAX_LEARNED_PLACES} symbols, but the longest sentence has {longest} and "
            f"--max-steps is {rules.max_steps}"
        )
