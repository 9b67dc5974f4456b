"""What every process group written in Python has: a place, names, and answers to what torch asks of the backend below, of which there is none.

C++ callers reach a group by some names (`allreduce`), Python callers by others (`alltoall`), and names changed in PyTorch 2.13
(`_allgather_base` is `all_gather_single` now): groups answer to all of them. What they do with tensors alike stands here too.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from hora.comm.torch_private import PythonProcessGroup


class PythonGroup(PythonProcessGroup):  # type: ignore[misc]
    """The place of this process in a group, and the group's names."""

    supports_splitting = supports_coalescing = False
    device_types: Sequence[str] = ("cpu",)

    def __init__(self, rank: int, size: int):
        # (store, rank, size), which the stubs show, cannot make an instance of a subclass.
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._name = self._description = ""

    @override
    def getRank(self) -> int:
        return self._rank

    @override
    def getSize(self) -> int:
        return self._size

    @override
    def setGroupName(self, name: str) -> None:
        self._name = name

    @override
    def getGroupName(self) -> str:
        return self._name

    @override
    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @override
    def getGroupDesc(self) -> str:
        return self._description

    def _get_backend(self, device: Any) -> "PythonGroup":  # noqa: ARG002 (torch's signature)
        """What torch asks whether a new group can be split off."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """What torch asks before it moves tensors of its own choice, such as those of `set_model_state_dict(broadcast_from_rank0=True)`."""
        return [torch.device(name) for name in self.device_types]


REDUCE_OPS = {
    "SUM": dist.ReduceOp.SUM, "AVG": dist.ReduceOp.AVG, "PRODUCT": dist.ReduceOp.PRODUCT, "MIN": dist.ReduceOp.MIN, "MAX": dist.ReduceOp.MAX,
    "BAND": dist.ReduceOp.BAND, "BOR": dist.ReduceOp.BOR, "BXOR": dist.ReduceOp.BXOR,
}  # fmt: skip
"""How our groups can reduce, by name."""


def op_name(torch_op: object, backend: str) -> str:
    """The name of an operation of torch's.

    Raises:
        RuntimeError: it is none that our groups have.
    """
    for name, theirs in REDUCE_OPS.items():
        if torch_op == theirs:
            return name
    raise RuntimeError(f"backend {backend} can reduce by {', '.join(REDUCE_OPS)}, but not by {torch_op}")


def flatten(tensor: Tensor, backend: str) -> Tensor:
    """`tensor` behind one another: its own memory where that is contiguous, else a copy.

    Raises:
        RuntimeError: it is not on the CPU.
    """
    if tensor.device.type != "cpu":
        raise RuntimeError(f"backend {backend} moves tensors on the CPU, but this one is on {tensor.device}")
    plain = tensor.detach() if tensor.requires_grad else tensor
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        return plain.resolve_conj().resolve_neg().contiguous().view(-1)
    # Not view(-1): a tensor of one element counts as contiguous whatever its stride, and would keep it.
    return plain if plain.dim() == 1 and plain.numel() > 1 else plain.as_strided((plain.numel(),), (1,))


def put_back(tensor: Tensor, flat: Tensor) -> None:
    """Brings what stands in `flat` into `tensor`, if it is not the same memory."""
    if tensor.data_ptr() != flat.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two flat tensors have memory in common."""
    begin, end = first.data_ptr(), first.data_ptr() + first.nbytes
    return second.data_ptr() < end and begin < second.data_ptr() + second.nbytes


def require_sizes(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    """Refuses parts of other sizes than fit.

    Raises:
        RuntimeError: names both.
    """
    if list(found) != list(wanted):
        raise RuntimeError(f"{name} takes parts of one size, one a rank, but got {list(found)} where {list(wanted)} fit")
