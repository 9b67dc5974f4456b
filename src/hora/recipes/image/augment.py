"""Random crops and mirror images on the device, each a pure function of (seed, epoch, image).

So neither the number of ranks or workers nor the order of the images changes what is trained on, and nothing need be saved. Images stay bytes
until they have been cropped. Tensor operations alone, without a random generator: they are captured into CUDA graphs as they are.
"""

import torch
from torch import Tensor

_GAMMA = 0x9E37_79B9_7F4A_7C15
_FACTORS = (0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)


def seeds_at(key: int, positions: Tensor) -> Tensor:
    """`hora.plan.seeds.seed_at` for each of `positions`, int64: the same 64 bits, the highest one as the sign."""
    # Products of int64 wrap around, which is what is wanted of them.
    mixed = (positions + 1) * _signed(_GAMMA) + _signed(key)
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        mixed = (mixed ^ _shift_right(mixed, shift)) * _signed(factor)
    return mixed ^ _shift_right(mixed, 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shift_right(values: Tensor, places: int) -> Tensor:
    return (values >> places) & ((1 << (64 - places)) - 1)


def augment(images: Tensor, seeds: Tensor, *, padding: int, flip: bool) -> Tensor:
    """Crops each image out of a black frame of `padding` pixels, and mirrors one in two if `flip`.

    Args:
        images: `[batch, channels, height, width]`, bytes.
        seeds: `[batch]`, int64, one for each image.
        padding: on each side.
        flip: left to right.
    """
    height, width = images.shape[2:]
    down, across = _below(seeds, 0, 2 * padding + 1), _below(seeds, 16, 2 * padding + 1)
    rows = down[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(len(images), -1)
    if flip:
        columns = torch.where((_below(seeds, 32, 2) > 0)[:, None], width - 1 - columns, columns)
    columns = columns + across[:, None]
    framed = torch.nn.functional.pad(images, (padding,) * 4) if padding else images
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[:, None, None]
    return framed[batch, channels, rows[:, None, :, None], columns[:, None, None, :]]


def _below(seeds: Tensor, place: int, bound: int) -> Tensor:
    """A number from 0 to `bound` - 1, made of 16 bits of each seed."""
    return ((seeds >> place & 0xFFFF) * bound) >> 16


def normalise(images: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Bytes as float32, each channel with mean 0 and standard deviation 1 by `mean` and `deviation`, `[channels, 1, 1]`."""
    return (images.float() - mean) / deviation
