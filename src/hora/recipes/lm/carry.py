"""The hidden state that rows carry from one window to the next: one for each micro-batch, whose rows are always the same."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hora.recipes.lm.model import LanguageModel, State


def initial_states(model: LanguageModel, micro_batches: Sequence[range]) -> list[State]:
    """The states of rows that begin, by micro-batch."""
    return [model.initial_state(len(rows)) for rows in micro_batches]


def by_row(states: Sequence[State], micro_batches: Sequence[range], device: torch.device) -> Tensor:
    """All states as one tensor, so that any number of ranks can go on with them: `[rows, kinds, layers, hidden]`, or `[rows, 0]` without memory."""
    if not any(states):
        return torch.zeros(sum(map(len, micro_batches)), 0, device=device)
    return torch.cat([torch.stack(state).permute(2, 0, 1, 3) for state in states])


def from_rows(rows: Tensor, micro_batches: Sequence[range], model: LanguageModel) -> list[State]:
    """What `by_row` was given, from the rows of these micro-batches, on the device of the model."""
    if not rows.numel():
        return initial_states(model, micro_batches)
    parts = rows.to(model.device).split([len(part) for part in micro_batches])
    return [tuple(part.permute(1, 2, 0, 3).contiguous()) for part in parts]
