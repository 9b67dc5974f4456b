"""What each rank has a part of (`DTensor`, as under `fully_shard`) becomes whole in a checkpoint, so that any number of ranks can read it.

One tensor after the other is put together and goes to the CPU of rank 0: no device holds more than one of them at a time.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hora.comm.dealt_out import as_dtensor
from hora.comm.session import session
from hora.train.checkpoint.content import Entry

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Parts = Mapping[str, Mapping[str, "DTensor"]]
"""By entry and name."""

Whole = Mapping[str, Mapping[str, Tensor]]
"""By entry and name too."""


def parts_in(entries: Iterable[Entry]) -> Parts:
    """The tensors of which each rank has a part."""
    return {
        entry.name: {name: part for name, tensor in entry.tensors.items() if (part := as_dtensor(tensor)) is not None} for entry in entries
    }


@torch.no_grad()
def gather_on_rank_zero(parts: Parts) -> Whole:
    """The whole tensors, on the CPU of rank 0; nothing on the other ranks. Collective."""
    whole: dict[str, dict[str, Tensor]] = {}
    for entry, named in parts.items():
        for name, part in named.items():
            tensor = _whole(part)
            if session().rank == 0:
                whole.setdefault(entry, {})[name] = tensor.cpu()
    return whole


def _whole(part: "DTensor") -> Tensor:
    # What was moved to the host goes back to where its ranks can exchange it.
    there = as_dtensor(part.detach().to(part.device_mesh.device_type))
    assert there is not None
    return there.full_tensor()
