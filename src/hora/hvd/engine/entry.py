"""What the engine is given: one operation with its tensors, from the call to the result."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hora.hvd.exceptions import HorovodInternalError
from hora.hvd.negotiation.request import Request


class Entry:
    """One operation of this rank.

    Args:
        request: what it is.
        tensors: what goes in, contiguous.
        outputs: where the result goes, of operations that keep the shape; may be `tensors`.

    Attributes:
        key: under which it is met.
        done: whether the host need not wait any more.
        error: why there is no result.
        result: of the operation.
        given: on a GPU, when the tensors are ready to be read.
        finished: on a GPU, when the result is ready to be read.
    """

    __slots__ = ("done", "error", "finished", "given", "key", "outputs", "request", "result", "tensors")

    def __init__(self, request: Request, tensors: Sequence[Tensor] = (), outputs: Sequence[Tensor] | None = None) -> None:
        self.request = request
        self.key = request.key
        self.tensors = tensors
        self.outputs = outputs
        self.done = False
        self.error: HorovodInternalError | None = None
        self.result: Any = None
        self.given: torch.cuda.Event | None = None
        self.finished: torch.cuda.Event | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the result can be had without waiting, or there is none."""
        return self.done and (self.finished is None or self.finished.query())

    def take(self) -> Any:
        """The result; on a GPU the current stream waits for it.

        Raises:
            HorovodInternalError: there is none; says why.
        """
        if self.error is not None:
            raise HorovodInternalError(str(self.error))  # one that other operations may have in common
        if self.finished is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.finished)
            for tensor in _tensors(self.result):
                if tensor.is_cuda:
                    tensor.record_stream(stream)  # it may have been allocated for the engine's stream
        return self.result


def _tensors(result: Any) -> Sequence[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for tensor in result if isinstance(tensor, Tensor)] if isinstance(result, list | tuple) else []
