"""Short linear summaries of tensors: 256 numbers from which differences, updates and constant factors can be told.

A count sketch (Charikar, Chen and Farach-Colton, ICALP 2002) with one row: element i is added, with a fixed pseudo-random sign, to bucket i mod 256.
The 2-norm of a sketch estimates that of the tensor within about a tenth; tensors of up to 256 elements are kept exactly.
"""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BUCKETS: Final = 256
_BLOCK: Final = 2**16
_BLOCKS: Final = 2**16

Sketch = npt.NDArray[np.float64]


def sketch(tensor: Tensor) -> Sketch:
    """The sketch of `tensor`, of any shape: min(numel, 256) numbers. Works in blocks, so that little memory is needed."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.numel() <= BUCKETS:
        return flat.double().cpu().numpy().copy()
    sums = torch.zeros(BUCKETS, dtype=torch.float64)
    signs, block_signs = _signs()
    for number, block in enumerate(flat.split(_BLOCK)):
        values = block.double().cpu() * signs[: len(block)]
        whole = len(values) // BUCKETS * BUCKETS
        part = values[:whole].view(-1, BUCKETS).sum(0)
        part[: len(values) - whole] += values[whole:]
        sums += part * block_signs[number % _BLOCKS]
    return sums.numpy()


@cache
def _signs() -> tuple[Tensor, Tensor]:
    """Signs within a block and signs of blocks. A generator of its own: the script's random numbers stay where they are."""
    generator = torch.Generator().manual_seed(20240229)
    within, of_blocks = (torch.randint(2, (size,), generator=generator).double() * 2 - 1 for size in (_BLOCK, _BLOCKS))
    return within, of_blocks
