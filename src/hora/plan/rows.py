"""Rows of a contiguous text stream: which tokens each row reads in which step.

A stream of tokens is cut into `num_rows` rows that are read side by side, a window of tokens at a time, each row from where it stopped: the
hidden state of a language model is carried along (Zaremba et al., Recurrent Neural Network Regularization, 2014). A row's targets are its
inputs one token later. Rows are dealt to ranks as samples are; the windows never depend on the number of ranks.
"""

from dataclasses import dataclass

from hora.errors import ConfigError
from hora.plan.logical import LogicalRanks
from hora.plan.samples import MicroStep, deal


@dataclass(frozen=True)
class RowPlan:
    """The rows of a stream and their windows.

    Attributes:
        num_tokens: length of the stream.
        num_rows: rows read side by side: the global batch.
        window: tokens of a row in one step.
        drop_last: with True, as for training: rows of num_tokens // num_rows tokens, the tail left out, and only whole windows. With False,
            as for evaluation: each token but the first is a target exactly once. The last window is then shorter, and when rows are not
            equally long the first ones have a step of one token to themselves.

    Raises:
        ConfigError: a size is below 1, or no step is left.
    """

    num_tokens: int
    num_rows: int
    window: int
    drop_last: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, but is {value} instead"
            for name, value in (("global_batch_size", self.num_rows), ("window", self.window))
            if value < 1
        ]
        if not problems and self.num_steps == 0:
            needed = self.num_rows * (self.window + 1) if self.drop_last else 2
            problems.append(
                f"a stream of {self.num_tokens} tokens is too short for {self.num_rows} rows with windows of {self.window}: it must have at "
                f"least {needed} tokens; decrease global_batch_size or window"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def num_steps(self) -> int:
        """Steps of one pass."""
        if self.drop_last:
            return self._num_columns // self.window
        return -(-self._num_columns // self.window) + (self._num_longer > 0)

    def columns(self, step: int) -> range:
        """Where in its row each row reads in `step`."""
        if self._is_last_token(step):
            return range(self._num_columns, self._num_columns + 1)
        return range(step * self.window, min((step + 1) * self.window, self._num_columns))

    def rows(self, step: int) -> range:
        """The rows that read in `step`: all, but for the step of what longer rows have more."""
        return range(self._num_longer if self._is_last_token(step) else self.num_rows)

    def start(self, row: int) -> int:
        """Where in the stream `row` begins."""
        if self.drop_last:
            return row * (self.num_tokens // self.num_rows)
        return row * self._num_columns + min(row, self._num_longer)

    def deal(self, step: int, logical_ranks: LogicalRanks, rank: int, micro_batch_size: int | None) -> list[MicroStep]:
        """The micro-batches of `rank` in `step`; their positions are rows, and a row is always with the same micro-batch."""
        dealt = deal(range(self.num_rows), logical_ranks, rank, micro_batch_size)
        reading = len(self.rows(step))
        clipped = [MicroStep(part.logical_rank, range(part.positions.start, min(part.positions.stop, reading))) for part in dealt]
        return [part for part in clipped if part.positions]

    @property
    def _num_columns(self) -> int:
        """Targets that every row has."""
        if self.drop_last:
            return max(self.num_tokens // self.num_rows - 1, 0)
        return max(self.num_tokens - 1, 0) // self.num_rows

    @property
    def _num_longer(self) -> int:
        """How many rows have one target more."""
        return 0 if self.drop_last else max(self.num_tokens - 1, 0) % self.num_rows

    def _is_last_token(self, step: int) -> bool:
        return self._num_longer > 0 and step == self.num_steps - 1
