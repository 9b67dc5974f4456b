"""Adasum: combines gradients so that what they agree on is averaged and what is orthogonal is added (Maleki et al. 2020, arXiv:2006.02924).

Every rank is given all vectors and combines them in one tree, in float64 products as Horovod does: the same bits everywhere, at the price of
`world_size` times the memory of the largest tensor and as many bytes received.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def combine(vectors: Sequence[Tensor]) -> Tensor:
    """The Adasum of `vectors` of one shape, as many as a power of two."""
    level = list(vectors)
    while len(level) > 1:
        level = [_pair(first, second) for first, second in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _pair(first: Tensor, second: Tensor) -> Tensor:
    a, b = first.double().flatten(), second.double().flatten()
    product, norm_a, norm_b = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
    # A vector of zeros agrees with nothing.
    share_a = torch.where(norm_a > 0, 1 - product / (2 * norm_a), torch.ones_like(norm_a))
    share_b = torch.where(norm_b > 0, 1 - product / (2 * norm_b), torch.ones_like(norm_b))
    return (a * share_a + b * share_b).view(first.shape).to(first.dtype)


def is_power_of_two(number: int) -> bool:
    """Whether Adasum serves so many ranks."""
    return number > 0 and number & (number - 1) == 0
