"""Which checkpoints are kept: the latest ones and the best ones."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from hora import log
from hora.errors import CheckpointIncomplete, CheckpointMismatch, ConfigError
from hora.train.checkpoint.manifest import CheckpointName
from hora.train.checkpoint.storage import Storage

Best = Literal["min", "max"]
Metrics = Mapping[CheckpointName, float | None]


@dataclass(frozen=True)
class Retention:
    """Rule for what is kept: the newest `keep_last` and, by metric, the best `keep_best` (`best`: is a small or a large metric good)."""

    keep_last: int = 2
    keep_best: int = 1
    best: Best = "min"

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ConfigError(f"keep_last must be at least 1, but is {self.keep_last} instead")
        if self.keep_best < 0:
            raise ConfigError(f"keep_best must be at least 0, but is {self.keep_best} instead")
        if self.best not in ("min", "max"):
            raise ConfigError(f"best must be 'min' or 'max', but is {self.best!r} instead")

    def ranked(self, metrics: Metrics) -> list[CheckpointName]:
        """The checkpoints that have a metric, the best first; of equal ones the older."""
        sign = 1 if self.best == "min" else -1
        measured = [(sign * metric, name) for name, metric in metrics.items() if metric is not None]
        return [name for _, name in sorted(measured)]

    def kept(self, metrics: Metrics) -> set[CheckpointName]:
        """Which of the whole checkpoints in `metrics` are kept."""
        return {*sorted(metrics)[-self.keep_last :], *self.ranked(metrics)[: self.keep_best]}

    def prune(self, storage: Storage, damaged: Collection[CheckpointName] = ()) -> None:
        """Removes what is not kept; does nothing unless a whole checkpoint stays.

        Those that are `damaged`, or look so, do not count as kept and go too; those of a newer version are left alone. What cannot be
        removed is a warning.
        """
        metrics, useless = survey(storage, damaged)
        if not metrics:
            return
        for name in sorted((set(metrics) | set(useless)) - self.kept(metrics)):
            try:
                storage.remove(name)
            except OSError as error:
                log.get_logger().warning("old checkpoint %s could not be removed: %s", storage.path / str(name), error)


def survey(storage: Storage, damaged: Collection[CheckpointName] = ()) -> tuple[Metrics, list[CheckpointName]]:
    """The metric of each checkpoint that looks whole, and those that do not, or are known as `damaged`."""
    metrics: dict[CheckpointName, float | None] = {}
    useless: list[CheckpointName] = []
    for name in storage.names():
        try:
            metric = storage.manifest(name).metric
        except CheckpointMismatch:
            continue
        except CheckpointIncomplete:
            useless.append(name)
            continue
        if name in damaged:
            useless.append(name)
        else:
            metrics[name] = metric
    return metrics, useless
