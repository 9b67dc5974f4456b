"""From the words on the command line to a configuration. Imports no torch, so that mistakes are told at once."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hora.errors import ConfigError
from hora.recipes.nmt.config import DataConfig, NmtConfig, VocabularyConfig
from hora.recipes.nmt.named import NAMED, merged
from hora.recipes.nmt.texts import is_excerpt, require_texts, texts_of
from hora.recipes.settings import unknown_config
from hora.recipes.vocabularies import FILE_NAME
from hora.train.config import load_config

_SPLITS: Final = ("train", "valid", "test")
_UNKNOWN_TEXTS: Final = ("data_configs.train_data=['', '']", "data_configs.valid_data=['', '']")


def resolve_config(
    config: str | None = None,
    data: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    predefined: str | None = None,
    resume_from: Path | None = None,
) -> NmtConfig:
    """The configuration that a command line stands for: defaults, then `predefined`, then `config`, then `data`, then `overrides`.

    Args:
        config: a name or a YAML file; by default that of the run that is resumed.
        data: folder with the texts, such as `train.en`.
        overrides: `key.key=value`.
        predefined: a name.
        resume_from: run directory that goes on.

    Raises:
        ConfigError: naming everything that is wrong.
    """
    if config is None and resume_from is not None and (resume_from / "config.yaml").is_file():
        config = str(resume_from / "config.yaml")
    defaults = {} if predefined is None else _named(predefined, "--predefined_config")
    path = None
    if config is not None and (config in NAMED or not Path(config).is_file()):
        defaults = merged(defaults, _named(config, "--config"))
    elif config is not None:
        path = Path(config)
    texts: list[str] = []
    if data is not None:
        known = load_config(NmtConfig, path, [*_UNKNOWN_TEXTS, *overrides], defaults)
        texts = texts_in(data, known.data_configs.languages)
    found = load_config(NmtConfig, path, [*texts, *overrides], defaults)
    return replace(found, data_configs=_with_absolute_paths(found.data_configs))


def texts_in(directory: Path, languages: Sequence[str]) -> list[str]:
    """Overrides that name the texts in `directory`: `train`, `valid` and perhaps `test`, each in both languages, plain or `.gz`.

    Raises:
        ConfigError: the directory or a text is not there; all are named.
    """
    found: dict[str, list[Path]] = {}
    missing: list[str] = []
    for split in _SPLITS:
        paths = [
            next((p for p in (directory / f"{split}.{name}", directory / f"{split}.{name}.gz") if p.is_file()), None) for name in languages
        ]
        if split == "test" and not any(paths):
            continue
        missing += [f"{split}.{name}" for name, path in zip(languages, paths, strict=True) if path is None]
        found[split] = [path for path in paths if path is not None]
    if missing:
        raise ConfigError(
            f"--data {directory} must hold the texts of data_configs.lang_pair = {'-'.join(languages)}, but lacks {', '.join(missing)}"
        )
    return [f"data_configs.{split}_data={json.dumps([str(path) for path in paths])}" for split, paths in found.items()]


def require_files(config: NmtConfig, kept: Path | None = None) -> None:
    """Looks for what the configuration names, so that a mistake is told before the first step.

    Args:
        config: of the run.
        kept: directory of a run that goes on, with the vocabularies that it has there.

    Raises:
        ConfigError: a file is not there; all texts are named.
    """
    data = config.data_configs
    require_texts([name for names in texts_of(data).values() for name in names])
    for vocabulary in () if kept is not None and (kept / FILE_NAME).exists() else data.vocabularies:
        for key in ("dict_path", "codes", "sentencepiece"):
            name = getattr(vocabulary, key)
            if name and not Path(name).is_file():
                raise ConfigError(f"data_configs.vocabularies: {key} must name a file, but there is no {name}")


def _named(name: str, word: str) -> dict[str, Any]:
    if name in NAMED:
        return NAMED[name]
    raise unknown_config(word, "a YAML file or one of" if word == "--config" else "one of", name, NAMED)


def _with_absolute_paths(data: DataConfig) -> DataConfig:
    """So that the run can go on from elsewhere."""
    texts: dict[str, Any] = {f"{split}_data": tuple(map(_absolute, names)) for split, names in texts_of(data).items()}
    others: dict[str, Any] = {key: _absolute(getattr(data, key)) for key in ("cache", "bleu_valid_reference")}
    return replace(data, vocabularies=tuple(map(_with_absolute_files, data.vocabularies)), **texts, **others)


def _with_absolute_files(vocabulary: VocabularyConfig) -> VocabularyConfig:
    given = {key: getattr(vocabulary, key) for key in ("dict_path", "codes", "sentencepiece")}
    absolute: dict[str, Any] = {key: _absolute(name) for key, name in given.items() if name}
    return replace(vocabulary, **absolute)


def _absolute(name: str) -> str:
    return name if not name or is_excerpt(name) else os.path.abspath(name)
