"""The words of example scripts for images, as settings of the recipe: `-a vgg19 --train-batch 256 --schedule 81 122`. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hora.errors import ConfigError

SETTINGS: Final = {
    "arch": "model.arch",
    "depth": "model.depth",
    "drop": "model.dropout",
    "cardinality": "model.cardinality",
    "widen_factor": "model.widen_factor",
    "growth_rate": "model.growth_rate",
    "compression_rate": "model.compression",
    "epochs": "epochs",
    "batch_size": "data.global_batch_size",
    "test_batch": "data.eval_batch_size",
    "workers": "data.num_workers",
    "lr": "optimizer.lr",
    "lr_rule": "optimizer.lr_rule",
    "momentum": "optimizer.momentum",
    "weight_decay": "optimizer.weight_decay",
    "gamma": "schedule.gamma",
    "seed": "seed",
}
"""Words that stand for one setting each, by the names of their parameters."""

_BLOCKS: Final = {"BasicBlock": "false", "Bottleneck": "true"}


def overrides_of(words: Mapping[str, Any], world_size: int) -> list[str]:
    """The settings, `key=value`, for which `words` stand.

    Raises:
        ConfigError: two of them, or one and a `--set`, say the same thing.
    """
    if words["batch_size"] is not None and words["batch_per_rank"] is not None:
        raise ConfigError("--batch-size is that of all ranks together and --batch-per-rank that of each, so one of them must be left out")
    found = list(_settings(words, world_size))
    given = {override.partition("=")[0] for override in words["overrides"]}
    if twice := [setting for setting in found if setting.partition("=")[0] in given]:
        raise ConfigError(f"--set and another option give the same setting ({', '.join(twice)}); leave one out")
    return [*words["overrides"], *found]


def _settings(words: Mapping[str, Any], world_size: int) -> Iterator[str]:
    words = _with_depth_in_name(words)
    for name, key in SETTINGS.items():
        if words[name] is not None:
            yield f"{key}={words[name]}"
    if words["block_name"] is not None:
        yield f"model.bottleneck={_BLOCKS[words['block_name']]}"
    if words["schedule"]:
        yield "schedule.kind=steps"
        yield f"schedule.milestones=[{', '.join(map(str, words['schedule']))}]"
    if words["batch_per_rank"] is not None:
        yield f"data.global_batch_size={words['batch_per_rank'] * world_size}"


def _with_depth_in_name(words: Mapping[str, Any]) -> Mapping[str, Any]:
    """`-a vgg_bn --depth 19` as `-a vgg19_bn`: of VGG the depth is a part of the name."""
    found = re.fullmatch("(vgg)([-_]bn)?", words["arch"] or "", re.IGNORECASE)
    if found is None or words["depth"] is None:
        return words
    return {**words, "arch": f"{found[1]}{words['depth']}{found[2] or ''}", "depth": None}


def repeat_names(words: list[str], name: str) -> list[str]:
    """`--schedule 81 122` as `--schedule 81 --schedule 122`, which is what click understands."""
    repeated: list[str] = []
    inside = False
    for word in words:
        if inside and word.isdigit():
            repeated += [name, word]
            continue
        inside = word == name
        repeated += [] if inside else [word]
    return repeated
