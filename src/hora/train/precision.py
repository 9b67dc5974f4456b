"""What a model computes in, and how exactly a GPU multiplies float32 matrices.

PyTorch lets cuDNN's recurrent layers and convolutions round their inputs to TF32 (10 bits of mantissa) by default: faster, but two ways of cutting
the same batch then differ in the third digit of a product, and a comparison of runs says little. Settings of torch, changed and put back.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What autocast computes in."""


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Inside the `with` block operations on `device` compute in `precision`, one of `PRECISIONS`, where that is good enough."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Inside the `with` block float32 products are rounded to TF32, or not at all. No effect on a CPU."""
    cudnn: Any = torch.backends.cudnn  # torch's own annotations leave these settings out
    knobs: tuple[Any, ...] = (cudnn.rnn, cudnn.conv, torch.backends.cuda.matmul)
    before = [knob.fp32_precision for knob in knobs]
    for knob in knobs:
        knob.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        for knob, value in zip(knobs, before, strict=True):
            knob.fp32_precision = value
