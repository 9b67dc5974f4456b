"""From the words on the command line to a configuration. Imports no torch, so that mistakes are told at once."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hora.recipes.fetch import DATASETS
from hora.recipes.lm.config import NAMED, LmConfig, canonical_name
from hora.recipes.settings import named_config
from hora.train.config import load_config

_DEFAULT: Final = "small"


def resolve_config(
    config: str | None = None, data: str | None = None, overrides: Sequence[str] = (), *, resume_from: Path | None = None
) -> LmConfig:
    """The configuration that a command line stands for.

    Args:
        config: a name or a YAML file; by default that of the run that is resumed, or `small`.
        data: what `data.path` becomes; a directory is made absolute, so that the run can be resumed from elsewhere.
        overrides: `key.key=value`, over all else.
        resume_from: run directory that goes on.

    Raises:
        ConfigError: naming everything that is wrong.
    """
    given = [] if data is None else [f"data.path={json.dumps(_absolute(data))}"]
    if config is None and resume_from is not None and (resume_from / "config.yaml").is_file():
        return load_config(LmConfig, resume_from / "config.yaml", [*given, *overrides])
    name = canonical_name(config or _DEFAULT)
    return named_config(LmConfig, name if name in NAMED else config or _DEFAULT, NAMED, [*given, *overrides])


def run_name(config: str | None) -> str:
    """A short name for a run with this `--config`, for directories and results."""
    return canonical_name(Path(config or _DEFAULT).stem)


def _absolute(data: str) -> str:
    return data if data == "excerpt" or data in DATASETS else os.path.abspath(data)
