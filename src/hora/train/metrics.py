"""What a run measures, one row at a time: `metrics.jsonl`, and TensorBoard where it is installed and wanted.

A row is one line of strict JSON and is written by one call, so that a reader never sees half of one unless the writer was killed in it;
`cut_metrics` drops such a half together with what lies after the step from which a run goes on.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from hora import log
from hora.train.files import replace_file
from hora.writing import NO_FOLLOW


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """One measurement; None where a field has no meaning.

    Attributes:
        step: updates done.
        epoch: from 0.
        split: `train`, `valid` or `test`.
        loss: mean per token (or sample), in nats.
        tokens: tokens (or samples) that the mean is over.
        tokens_per_s: of all ranks together.
        lr: learning rate of the last update.
        bleu: of translations.
        top1: share of samples whose class came first; `top5`: or was among the first five.
    """

    step: int
    epoch: int
    split: str
    loss: float | None = None
    perplexity: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    lr: float | None = None
    bleu: float | None = None
    top1: float | None = None
    top5: float | None = None

    def to_json(self) -> str:
        """One line of strict JSON with all keys; numbers that are not finite become null."""
        return json.dumps({name: _strict(value) for name, value in asdict(self).items()}, allow_nan=False)


def _strict(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsSink(Protocol):
    """Somewhere rows go.

    Attributes:
        path: where, for messages.
    """

    path: Path

    def write(self, row: MetricsRow) -> None:
        """Takes one row."""

    def close(self) -> None:
        """Ends."""


class MetricsWriter:
    """Gives each row to all sinks; without sinks (on ranks that do not write) to none. A context manager that closes them.

    Training does not end for want of room for a row: a sink whose disk refuses one is named in a warning, once until it takes rows again.
    """

    def __init__(self, sinks: Sequence[MetricsSink] = ()) -> None:
        self._sinks = sinks
        self._refusing: set[MetricsSink] = set()

    def write(self, row: MetricsRow) -> None:
        """Records one row."""
        for sink in self._sinks:
            self._do(sink, partial(sink.write, row))

    def close(self) -> None:
        """Closes the sinks."""
        for sink in self._sinks:
            self._do(sink, sink.close)

    def _do(self, sink: MetricsSink, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            if sink not in self._refusing:
                log.get_logger().warning("metrics cannot be written into %s: %s; training goes on", sink.path, error)
            self._refusing.add(sink)
        else:
            self._refusing.discard(sink)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines:
    """Appends rows to a file, each by one unbuffered write. What the disk refuses is kept and written with the next row.

    Raises:
        OSError: it cannot be written, or is a symbolic link, which others may have planted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._left = b""
        self._file = open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags | NO_FOLLOW, 0o666))  # noqa: SIM115 (closed by close)

    def write(self, row: MetricsRow) -> None:
        """Appends one line."""
        self._left += f"{row.to_json()}\n".encode()
        self._write_what_is_left()

    def close(self) -> None:
        """Closes the file."""
        try:
            self._write_what_is_left()
        finally:
            self._file.close()

    def _write_what_is_left(self) -> None:
        while self._left:
            self._left = self._left[self._file.write(self._left) :]


class TensorBoard:
    """Writes each number of a row as a scalar `split/name`; what an earlier run wrote after `after_step` is hidden."""

    def __init__(self, path: Path, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = path
        self._writer = SummaryWriter(str(path), purge_step=after_step + 1)

    def write(self, row: MetricsRow) -> None:
        """Adds the numbers of one row."""
        for name in ("loss", "perplexity", "tokens_per_s", "lr", "bleu", "top1", "top5"):
            value = getattr(row, name)
            if value is not None:
                self._writer.add_scalar(f"{row.split}/{name}", value, row.step)

    def close(self) -> None:
        """Writes what is buffered and closes."""
        self._writer.close()


def open_tensorboard(path: Path, after_step: int) -> list[MetricsSink]:
    """A TensorBoard sink; none, with a line that says how to get it, when TensorBoard is not installed."""
    try:
        return [TensorBoard(path, after_step)]
    except ImportError:
        log.get_logger().info("TensorBoard is not installed, so %s is not written; pip install 'hora[tensorboard]'", path)
        return []


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; lines that are no JSON objects are left out."""
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def cut_metrics(path: Path, after_step: int) -> None:
    """Removes the rows after step `after_step`, and what is no whole row, so that no step appears twice when a run goes on from there."""
    if path.exists():
        kept = [row for row in read_metrics(path) if isinstance(row.get("step"), int) and row["step"] <= after_step]
        replace_file(path, "".join(f"{json.dumps(row)}\n" for row in kept).encode())
