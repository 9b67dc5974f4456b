"""Everything that a run leaves behind, in one directory that belongs to one job at a time.

    config.yaml     the configuration as it was resolved
    metrics.jsonl   one measurement a line
    checkpoints/    see `hora.train.checkpoint`
    logs/           one file a rank
    tensorboard/    where TensorBoard is installed and wanted
    curve.png       where matplotlib is installed
    job             the name of the job of `hora run` that works here, or worked here last
    lock            who works here; gone when nobody does

Only rank 0 writes, and what goes wrong there goes wrong on every rank.
"""

from pathlib import Path
from typing import Self

from hora import env
from hora.errors import CheckpointError, ConfigError
from hora.train.checkpoint.storage import Storage
from hora.train.curve import draw_curve
from hora.train.files import replace_file
from hora.train.lock import DirectoryLock
from hora.train.metrics import JsonLines, MetricsSink, MetricsWriter, cut_metrics, open_tensorboard
from hora.train.rank_zero import on_rank_zero


class RunDirectory:
    """The directory of a run; a context manager that claims it for this job and gives it back.

    Collective: all ranks enter the `with` block and call the methods; rank 0 acts.

    Args:
        path: made if it does not exist.
        config: text of the resolved configuration, written to `config.yaml`.
        resume: whether a run that is there already goes on; otherwise it is refused.
        anew: whether a run that is there already, but has no checkpoint, makes room for this one.
        restarted: whether this job has been started before, and goes on with what it has left here, however far it had come.

    Raises:
        ConfigError: on entering; the directory holds a run already, another job works in it, or it cannot be written.
        CheckpointError: on entering; there is nothing to resume.
    """

    def __init__(self, path: Path, *, config: str = "", resume: bool = False, anew: bool = False, restarted: bool = False) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.curve = path / "curve.png"
        self._text = config
        self._resume = resume
        self._anew = anew
        self._restarted = restarted
        self._job = path / "job"
        self._lock = DirectoryLock(path)

    def __enter__(self) -> Self:
        on_rank_zero(self._claim)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def open_metrics(self, *, after_step: int = 0, tensorboard: bool = False) -> MetricsWriter:
        """Opens `metrics.jsonl` for more rows; those after `after_step` (of the checkpoint that the run goes on from) are removed.

        A run that goes on has been found to fit its checkpoint by now, so `config.yaml` becomes that of this start.

        Collective: all ranks call it; the writers of other ranks than 0 write nothing.

        Raises:
            ConfigError: it cannot be written.
        """
        sinks: list[MetricsSink] = []
        on_rank_zero(lambda: sinks.extend(self._open_sinks(after_step, tensorboard)))
        return MetricsWriter(sinks)

    def draw_curve(self, *, value: str = "perplexity") -> bool:
        """Draws `value` of all measurements into `curve.png`; returns whether that could be done.

        Collective: all ranks call it.
        """
        return on_rank_zero(lambda: draw_curve(self.metrics, self.curve, value=value))

    def _claim(self) -> None:
        if self._resume and not self.path.is_dir():
            raise CheckpointError(f"nothing to resume from in {self.path}: start without --resume, or give the right run directory")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._fill()
        except OSError as error:
            self._lock.release()
            raise ConfigError(f"a run directory must be writable, but {self.path} is not: {error}; choose another one") from error
        except ConfigError:
            self._lock.release()
            raise

    def _fill(self) -> None:
        if not self._resume and not (self._restarted and self._is_ours()) and self._holds_run():
            if Storage(self.checkpoints).names():
                raise ConfigError(f"{self.path} holds a run already; add --resume to go on with it, or choose another directory")
            if not self._anew:
                raise ConfigError(
                    f"{self.path} holds a run already, which ended before its first checkpoint; remove it, or choose another directory"
                )
        for directory in (self.checkpoints, self.logs):
            directory.mkdir(exist_ok=True)
        if _job_id():
            replace_file(self._job, _job_id())
        else:
            self._job.unlink(missing_ok=True)
        if not self._resume:
            replace_file(self.config, self._text.encode())

    def _is_ours(self) -> bool:
        """Whether an earlier start of this job has claimed it."""
        return bool(_job_id()) and self._job.is_file() and self._job.read_bytes() == _job_id()

    def _holds_run(self) -> bool:
        return self.config.exists() or self.metrics.exists() or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def _open_sinks(self, after_step: int, tensorboard: bool) -> list[MetricsSink]:
        try:
            replace_file(self.config, self._text.encode())
            cut_metrics(self.metrics, after_step)
            others = open_tensorboard(self.tensorboard, after_step) if tensorboard else []
            return [JsonLines(self.metrics), *others]
        except (OSError, UnicodeEncodeError) as error:  # the latter of TensorBoard, which takes names in UTF-8 alone
            raise ConfigError(f"{self.path} must be writable, but is not: {error}") from error


def _job_id() -> bytes:
    """The name that the launcher gave this job, the same in all its starts; empty without a launcher of Hora's."""
    return (env.JobEnv.read().job_id or "").encode()
