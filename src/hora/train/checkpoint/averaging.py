"""The mean of the weights of several checkpoints, as a plain safetensors file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from torch import Tensor

from hora.errors import CheckpointMismatch, ConfigError
from hora.train.checkpoint.export import plain_tensors, require_new, write_tensors
from hora.train.checkpoint.inspection import find

_SHOWN: Final = 10


def choose(paths: Sequence[Path], last: int | None) -> list[Path]:
    """The checkpoints at `paths`, the newest `last` of each place that holds several; all of them without that.

    Raises:
        ConfigError: there are fewer than two in all, or fewer at a place than `last`, or one of them comes twice.
    """
    chosen: list[Path] = []
    for path in paths:
        found = find(path)
        if last is not None and len(found) > 1 and len(found) < last:
            raise ConfigError(f"--last {last} must be at most the number of checkpoints, but {path} holds {len(found)}")
        chosen += found[-(last or len(found)) :]
    if twice := next((path for path, count in Counter(map(Path.resolve, chosen)).items() if count > 1), None):
        raise ConfigError(
            f"each checkpoint must be given once, but {', '.join(map(str, paths))} have {twice} more than once; leave one out"
        )
    if len(chosen) < 2:
        raise ConfigError(f"a mean needs at least two checkpoints, but {', '.join(map(str, paths))} gives {len(chosen)}")
    return chosen


def average(checkpoints: Sequence[Path], entry: str, to: Path) -> int:
    """Writes the mean of the tensors of `entry` over all `checkpoints` into the new file `to`, which appears whole or not at all.

    Sums are made in float64, and means have the type of the tensors. What is no floating-point number is taken from the last checkpoint. Each
    byte read is verified.

    Returns:
        How many tensors were written.

    Raises:
        CheckpointIncomplete: a checkpoint is damaged.
        CheckpointMismatch: names or shapes differ.
        ConfigError: there is no such entry, or `to` exists or cannot be written.
    """
    require_new(to)
    totals: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        tensors = plain_tensors(checkpoint, entry)
        if totals and (differing := _differing(tensors, totals)):
            names = ", ".join(differing[:_SHOWN])
            raise CheckpointMismatch(f"the checkpoints must be of one model, but {checkpoint} and {checkpoints[0]} differ in {names}")
        totals = {name: totals.get(name, 0) + tensor.double() for name, tensor in tensors.items()}
    means = {
        name: (totals[name] / len(checkpoints)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    write_tensors(to, means)
    return len(means)


def _differing(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """The names that are not in both with one shape."""
    return sorted(
        name
        for name in tensors.keys() | others.keys()
        if name not in tensors or name not in others or tensors[name].shape != others[name].shape
    )
