"""Where the engine's work runs: on the CPU where it is called, on a GPU in a stream of the engine's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hora.hvd.engine.entry import Entry


class CpuLane:
    """Work of the host: done when the call returns."""

    def give(self, entry: Entry) -> None:
        """Notes, in the thread that gives it, when the tensors of `entry` are ready."""

    @contextmanager
    def work(self, entries: Sequence[Entry]) -> Iterator[None]:  # noqa: ARG002 (as on a GPU)
        """Inside the `with` block the operation of `entries` is carried out."""
        yield


class GpuLane(CpuLane):
    """Work of a GPU: begun when the call returns, after what is done in the stream that gave it.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def give(self, entry: Entry) -> None:
        """Notes, in the thread that gives it, when the tensors of `entry` are ready."""
        entry.given = torch.cuda.Event()
        entry.given.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def work(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Inside the `with` block the operation of `entries` is carried out."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for entry in entries:
                if entry.given is not None:
                    self._stream.wait_event(entry.given)
                _use([*entry.tensors, *(entry.outputs or ())], self._stream)
            yield
            finished = torch.cuda.Event()
            finished.record(self._stream)
            for entry in entries:
                entry.finished = finished


def _use(tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def lane_for(device: torch.device) -> CpuLane:
    """Where work on `device` runs."""
    return GpuLane(device) if device.type == "cuda" else CpuLane()
