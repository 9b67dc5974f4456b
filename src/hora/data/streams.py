"""hora.TextStream: a contiguous text, read in windows by rows that go on where they stopped.

Which row reads what in which step is `plan.rows`. The hidden state belongs to the recipe: it is carried from step to step by row, and each
micro-batch says which rows it holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from hora.data.agreement import require_same_loader
from hora.data.role import Role
from hora.data.steps import Loaded, Step, StepLoader
from hora.errors import ConfigError
from hora.plan.rows import RowPlan


class TextBatch(tuple[Tensor, Tensor]):
    """`(inputs, targets)`, both int64 of shape `[rows, time]`; `rows` says which rows of the global batch they are.

    The targets are the inputs one token later.
    """

    rows: range

    def __new__(cls, inputs: Tensor, targets: Tensor, rows: range) -> Self:
        """Puts the two tensors together."""
        batch = super().__new__(cls, (inputs, targets))
        batch.rows = rows
        return batch

    @property
    def inputs(self) -> Tensor:
        """Tokens that are read, `[rows, time]`."""
        return self[0]

    @property
    def targets(self) -> Tensor:
        """Tokens that are to be predicted, `[rows, time]`."""
        return self[1]


class TextStream(StepLoader):
    """Yields the steps of one pass over a text; iterated again, the same steps as the next epoch.

    The text is cut into `global_batch_size` rows, read side by side, `window` tokens a step. Rows are dealt to ranks in contiguous blocks, so a
    row is always with the same rank and its hidden state stays there. The global batches do not depend on the number of ranks.

    Collective: made on all ranks, with the same text and arguments, and iterated on all.

    Args:
        tokens: the text, integers of shape `[num_tokens]`; a memory-mapped tensor is read window by window.
        global_batch_size: number of rows.
        window: tokens of a row in one step: what backpropagation through time sees.
        micro_batch_size: most rows of one forward and backward; by default all that this rank has.
        drop_last: with True, as for training, rows have num_tokens // global_batch_size tokens, and the tail and the last, shorter window are
            left out. With False, as for evaluation, every token but the first is a target exactly once, whatever the number of rows and ranks.
        rank: whose rows to yield, together with `world_size`; by default this process's.
        world_size: number of ranks.
        logical_ranks: number of parts that the rows are dealt to, for runs that must not depend on `world_size`.

    Raises:
        ConfigError: the text is too short, there are fewer rows than ranks, or a size is below 1.
        CollectiveMismatch: ranks have a text of another length, or other settings; on every rank alike.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        global_batch_size: int,
        window: int,
        micro_batch_size: int | None = None,
        drop_last: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        logical_ranks: int | None = None,
    ):
        super().__init__()
        _require_text(tokens)
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size must be at least 1, but is {micro_batch_size} instead")
        self._tokens = tokens
        self._plan = RowPlan(len(tokens), global_batch_size, window, drop_last)
        self._role = Role.find(rank, world_size, logical_ranks)
        self._micro_batch_size = micro_batch_size
        if self._role.logical_ranks.count > global_batch_size:
            raise ConfigError(
                f"each rank must have at least one row, but {global_batch_size} rows are dealt to {self._role.logical_ranks.count} ranks; use at "
                f"most {global_batch_size}, or increase global_batch_size"
            )
        require_same_loader("TextStream", self._role, self._facts())

    @property
    def rows(self) -> range:
        """The rows of the global batch that this rank reads."""
        return self._role.logical_ranks.share(range(self._plan.num_rows), self._role.rank)

    @property
    def micro_batches(self) -> list[range]:
        """The rows of each micro-batch of this rank; a row is always with the same one."""
        steps = self._plan.deal(0, self._role.logical_ranks, self._role.rank, self._micro_batch_size)
        return [range(step.positions[0], step.positions[-1] + 1) for step in steps]

    def __len__(self) -> int:
        """Steps of one pass, the same on every rank."""
        return self._plan.num_steps

    def _steps(self, epoch: int, first: int) -> Iterator[Step]:
        for index in range(first, len(self)):
            micro_steps = self._plan.deal(index, self._role.logical_ranks, self._role.rank, self._micro_batch_size)
            loaded = (Loaded(self._read(index, micro_step.positions), micro_step.positions) for micro_step in micro_steps)
            yield Step(epoch, index, micro_steps, loaded, partial(self._counts, index), self._role.in_job)

    def _counts(self, index: int) -> list[int]:
        ranks = self._role.logical_ranks
        return [len(self._plan.deal(index, ranks, rank, self._micro_batch_size)) for rank in range(ranks.world_size)]

    def _read(self, step: int, rows: range) -> TextBatch:
        columns = self._plan.columns(step)
        begins = [self._plan.start(row) + columns.start for row in rows]
        both = torch.stack([self._tokens[begin : begin + len(columns) + 1] for begin in begins]).to(torch.int64)
        return TextBatch(both[:, :-1].contiguous(), both[:, 1:].contiguous(), rows)

    def _facts(self) -> Mapping[str, Any]:
        return asdict(self._plan)


def _require_text(tokens: Tensor) -> None:
    if tokens.ndim != 1 or tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
        raise ConfigError(f"tokens must be integers of shape [num_tokens], but are {tokens.dtype} of shape {list(tokens.shape)} instead")
