"""From the words on the command line to a configuration. Imports no torch, so that mistakes are told at once."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hora.recipes.image.config import ImageConfig
from hora.recipes.image.named import DEFAULT, NAMED
from hora.recipes.image.places import BUILT_IN, NAMED_SETS, locate
from hora.recipes.settings import named_config
from hora.train.config import load_config

_BY_KIND: Final = {"idx": "mnist", "cifar": "cifar10", "folder": "imagenet-resnet50", "synthetic": "cifar10"}


def resolve_config(
    config: str | None = None, data: str | None = None, overrides: Sequence[str] = (), *, resume_from: Path | None = None
) -> ImageConfig:
    """The configuration that a command line stands for.

    Args:
        config: a name or a YAML file; by default that of the run that is resumed, or the one for the data.
        data: what `data.path` becomes; a directory is made absolute, so that the run can be resumed from elsewhere.
        overrides: `key.key=value`, over all else.
        resume_from: run directory that goes on.

    Raises:
        ConfigError: naming everything that is wrong.
    """
    given = [] if data is None else [f"data.path={json.dumps(_absolute(data))}"]
    if config is None and resume_from is not None and (resume_from / "config.yaml").is_file():
        return load_config(ImageConfig, resume_from / "config.yaml", [*given, *overrides])
    return named_config(ImageConfig, config or default_name(data), NAMED, [*given, *overrides])


def default_name(data: str | None) -> str:
    """The configuration for these data: that of the same name, or for a directory the one for images of its kind.

    Raises:
        ConfigError: there is no such directory, or it holds no images.
    """
    if data is None:
        return DEFAULT
    return data if data in NAMED else _BY_KIND[locate(data).kind]


def _absolute(data: str) -> str:
    return data if data in (*BUILT_IN, *NAMED_SETS) else os.path.abspath(data)
