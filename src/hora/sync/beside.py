"""Work of the device beside that of the current stream: sums on their way, and small kernels that would hold up a captured step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Beside:
    """A stream of its own, or none: then all runs in order."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._kept: list[Tensor] = []
        self._runs = False

    @contextmanager
    def running(self, uses: Iterable[Any]) -> Iterator[None]:
        """Work queued inside the `with` block runs beside that of the current stream, after what it holds so far.

        `uses`: tensors of the current stream that it reads; their memory is not given away before `join`.
        """
        if self._stream is None:
            yield
            return
        self._kept += [value for value in uses if isinstance(value, Tensor)]
        self._runs = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream goes on when all of it is done."""
        if self._stream is not None and self._runs:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._kept, self._runs = [], False
