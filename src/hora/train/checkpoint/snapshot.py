"""The state of one moment, copied away from what training goes on changing.

Tensors on GPUs are copied into pinned memory in the order of the current stream: the host does not wait for them, and what is started on that
stream afterwards changes them only after they have been copied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from hora.train.checkpoint.content import Entry
from hora.train.checkpoint.parts import Whole


@dataclass(frozen=True)
class Snapshot:
    """Entries as they were at one moment; after `take` with tensors on the CPU that belong to nobody else.

    Attributes:
        entries: their values are valid once `wait` has returned.
    """

    entries: Sequence[Entry]
    _copied: Sequence[torch.cuda.Event] = ()

    @classmethod
    def take(cls, entries: Iterable[Entry], own: Whole = MappingProxyType({})) -> "Snapshot":
        """Copies `entries`; the originals may change when this returns.

        Args:
            entries: what is to be copied.
            own: those of their tensors that belong to nobody else already.
        """
        originals = [(entry, {name: t for name, t in entry.tensors.items() if name not in own.get(entry.name, ())}) for entry in entries]
        copies = [entry.with_tensors({name: _copy(tensor) for name, tensor in tensors.items()}) for entry, tensors in originals]
        devices = {tensor.device for _, tensors in originals for tensor in tensors.values() if tensor.is_cuda}
        return cls(copies, [_mark(device) for device in devices])

    def wait(self) -> None:
        """Returns when all copies have been made; may be called by another thread."""
        for event in self._copied:
            event.synchronize()


@torch.no_grad()
def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=tensor.is_cuda)


def _mark(device: torch.device) -> torch.cuda.Event:
    """An event of what has been started on `device` so far; waiting for it sleeps."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
