"""Where the gradients of a bucket go, and the kernel that takes them there and looks at them on their way.

A copy of each and a norm of each read them twice, and a captured step cannot update anything before it has looked at the last one.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from hora import log

_DTYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""Their magnitudes are float32."""
_CHUNK: Final = 4096
"""Elements that a program of the kernel takes, in 8 warps."""
_GROUP: Final = 32
"""Gradients that a launch takes, whose addresses are among its arguments, so that they stay with a CUDA graph."""
_LINE: Final = 16
"""Bytes that are read at a time."""


class Packing:
    """The places of some gradients in one flat tensor.

    Args:
        flat: contiguous, on a GPU.
        places: views of it that are dense in memory; those that do not begin at multiples of 16 bytes are left to others.

    Attributes:
        members: the numbers of the places that `pack` fills.
    """

    def __init__(self, flat: Tensor, places: Sequence[Tensor]) -> None:
        self._flat = flat
        self._places = list(places)
        self.members = [number for number, place in enumerate(places) if place.numel() and not place.data_ptr() % _LINE]
        self._groups = [self.members[first : first + _GROUP] for first in range(0, len(self.members), _GROUP)]
        self._chunks = [
            torch.tensor(chunks_of([(self._begin(number), self._places[number].numel()) for number in group]), device=flat.device)
            for group in self._groups
        ]

    def takes(self, number: int, gradient: Tensor) -> bool:
        """Whether `pack` can copy `gradient`, a dense one, to place `number`, having one like it."""
        place = self._places[number]
        alike = gradient.dtype is place.dtype and gradient.shape == place.shape and _strides(gradient) == _strides(place)
        return number in self.members and alike and not gradient.data_ptr() % _LINE

    def pack(self, gradients: dict[int, Tensor]) -> Tensor:
        """Copies each of `gradients`, which are taken, to the place of its number, and looks at what then stands in all of `members`.

        Returns:
            The largest magnitude at each of `members`, in their order, as float32: infinity or NaN if a number there is not finite.
        """
        largest = torch.zeros(len(self.members), dtype=torch.int32, device=self._flat.device)
        for first, group, chunks in zip(range(0, len(self.members), _GROUP), self._groups, self._chunks, strict=True):
            sources = [gradients.get(number, self._places[number]) for number in group]
            _launch(self._flat, largest[first:], chunks, sources)
        return largest.view(torch.float32)

    def _begin(self, number: int) -> int:
        """The first element of a place, in the flat tensor."""
        return (self._places[number].data_ptr() - self._flat.data_ptr()) // self._flat.element_size()


def make_packing(flat: Tensor, places: Sequence[Tensor]) -> Packing | None:
    """None where the kernel cannot be had, as while a CUDA graph is captured; then each gradient is copied and looked at by itself."""
    if not flat.is_cuda or flat.dtype not in _DTYPES or torch.cuda.is_current_stream_capturing() or not _works(flat.device, flat.dtype):
        return None
    packing = Packing(flat, places)
    return packing if packing.members else None


def chunks_of(places: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """What the kernel's programs do, for places given by their first element and their number of elements, each from the beginning of a source:

    the number of the source, the first element of the chunk in it and in the flat tensor, and how many.
    """
    return [
        (number, at, begin + at, min(_CHUNK, numel - at)) for number, (begin, numel) in enumerate(places) for at in range(0, numel, _CHUNK)
    ]


def _strides(tensor: Tensor) -> list[int]:
    """Of its dimensions of several elements, which say where each lies: autograd keeps gradients of convolutions 1 x 1 with others of the rest."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _launch(flat: Tensor, largest: Tensor, chunks: Tensor, sources: Sequence[Tensor]) -> None:
    from hora.comm.packing import kernel

    spare = [sources[0]] * (_GROUP - len(sources))  # one number of arguments, and one kernel
    compiled: Any = kernel.copy_and_look[len(chunks), 1, 1]
    with torch.cuda.device_of(flat):  # in a thread of the user's another one is current, on which Triton would run it
        compiled(flat, largest, chunks, (*sources, *spare), _CHUNK, num_warps=8)


@lru_cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Compiles the kernel and tries it on few numbers."""
    try:
        flat = torch.zeros(_CHUNK + 3 * _LINE, dtype=dtype, device=device)
        packing = Packing(flat, [flat[:_LINE], flat[_LINE : _LINE + 1], flat[2 * _LINE : 2 * _LINE + _CHUNK + 1]])
        numbers = torch.arange(_CHUNK + 1, device=device) % 100
        gradients = [torch.full((_LINE,), -3.0, device=device), torch.full((1,), torch.nan, device=device), numbers]
        moved = {number: gradient.to(dtype) for number, gradient in enumerate(gradients)}
        found = packing.pack(moved).tolist()
        right = torch.equal(flat[2 * _LINE : -_LINE + 1], moved[2]) and torch.equal(flat[:_LINE], moved[0])
        if not right or found[0] != 3.0 or found[1] == found[1] or found[2] != 99.0:
            raise RuntimeError("the kernel does not copy what is there on this GPU")
    except Exception as error:  # there may be no Triton, no compiler, or no place for what it has made
        log.get_logger().debug("gradients are copied and looked at one after the other: %s", error)
        return False
    return True
