"""The hidden state that rows carry from one window to the next: detached, and kept by row so that any number of ranks can go on with it."""

import torch
from torch import Tensor

from hora.recipes.lm.model import LanguageModel, State


class CarriedState:
    """State of this rank's rows, handed out and taken back micro-batch by micro-batch.

    Args:
        model: what the state is for.
        num_rows: rows of this rank; may be 0.
    """

    def __init__(self, model: LanguageModel, num_rows: int) -> None:
        self._model = model
        self._num_rows = num_rows
        self._before: State
        self._after: list[State]
        self._taken: int
        self.reset()

    def reset(self) -> None:
        """Forgets everything: the state of rows that begin."""
        self._set(self._model.initial_state(self._num_rows))

    def take(self, num_rows: int) -> State:
        """The state of the next `num_rows` rows, where the micro-batch before stopped."""
        first, self._taken = self._taken, self._taken + num_rows
        return tuple(tensor[:, first : self._taken].contiguous() for tensor in self._before)

    def put(self, state: State) -> None:
        """Takes the state of the rows just handed out after their window; once all rows have been through, the next `take` begins anew."""
        self._after.append(tuple(tensor.detach() for tensor in state))
        if self._taken == self._num_rows:
            self._set(tuple(torch.cat(parts, dim=1) for parts in zip(*self._after, strict=True)))

    def by_row(self) -> Tensor:
        """The state between two steps as one tensor, a row of it for each row: `[rows, kinds, layers, hidden]`."""
        if not self._before:
            return torch.zeros(self._num_rows, 0, device=self._model.device)
        return torch.stack(self._before).permute(2, 0, 1, 3).contiguous()

    def load(self, rows: Tensor) -> None:
        """Goes on from what `by_row` gave for these rows, on any device."""
        if self._before:
            like = self._before[0]
            self._set(tuple(rows.to(like.device, like.dtype).permute(1, 2, 0, 3).contiguous()))

    def _set(self, state: State) -> None:
        self._before = state
        self._after = []
        self._taken = 0
