"""From the words on the command line to a configuration. Imports no torch, so that mistakes are told at once."""

import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from hora.errors import ConfigError
from hora.recipes.fetch import DATASETS
from hora.recipes.lm.config import NAMED, LmConfig, canonical_name
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
    if name in NAMED:
        return load_config(LmConfig, None, [*given, *overrides], defaults=asdict(NAMED[name]))
    path = Path(config or _DEFAULT)
    if not path.is_file():
        nearest = difflib.get_close_matches(name, NAMED, n=1)
        raise ConfigError(
            f"--config must be a YAML file or one of {', '.join(NAMED)}, but is {config!r} instead"
            + (f"; did you mean {nearest[0]}?" if nearest else "")
        )
    return load_config(LmConfig, path, [*given, *overrides])


def run_name(config: str | None) -> str:
    """A short name for a run with this `--config`, for directories and results."""
    return canonical_name(Path(config or _DEFAULT).stem)


def _absolute(data: str) -> str:
    return data if data == "excerpt" or data in DATASETS else os.path.abspath(data)
