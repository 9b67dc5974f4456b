"""From the words on the command line to a configuration. Imports no torch, so that mistakes are told at once."""

import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from hora.errors import ConfigError
from hora.recipes.image.architectures import canonical_arch
from hora.recipes.image.config import ImageConfig
from hora.recipes.image.named import DEFAULT, NAMED
from hora.recipes.image.places import BUILT_IN, NAMED_SETS, locate
from hora.recipes.settings import named_config
from hora.train.config import load_config

_OF_SOME: Final = (
    (
        "model",
        "arch",
        {
            "cardinality": ("resnext",),
            "widen_factor": ("wide-resnet", "resnext"),  # that of resnext is 4, as its scripts say
            "growth_rate": ("densenet",),
            "compression": ("densenet",),
            "dropout": ("wide-resnet", "densenet"),
        },
    ),
    ("optimizer", "kind", {"momentum": ("sgd",)}),
    ("schedule", "kind", {"gamma": ("steps",), "milestones": ("steps",), "final_factor": ("cosine",)}),
)
"""Settings that are heeded where another one is one of these."""

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
        resolved = load_config(ImageConfig, resume_from / "config.yaml", [*given, *overrides])
    else:
        resolved = named_config(ImageConfig, config or default_name(data), NAMED, [*given, *overrides])
    _require_heeded(resolved, overrides)
    return resolved


def _require_heeded(config: ImageConfig, overrides: Sequence[str]) -> None:
    """Refuses what was asked for in so many words and would change nothing; what a file holds for another choice is left alone."""
    asked = {override.partition("=")[0].strip() for override in overrides}
    problems = []
    for section, choice, owners_by_name in _OF_SOME:
        part = getattr(config, section)
        chosen = canonical_arch(part.arch)[0] if choice == "arch" else getattr(part, choice)
        for name, owners in owners_by_name.items():
            default = next(each.default for each in fields(part) if each.name == name)
            if f"{section}.{name}" in asked and chosen not in owners and getattr(part, name) != default:
                problems.append(
                    f"{section}.{name} is of {section}.{choice} = {' and '.join(owners)} alone, but that is {chosen}; leave it out, or give both"
                )
    if problems:
        raise ConfigError("; ".join(problems))


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
