"""What a rank tells of a sample, so that others can say whether theirs is the same one; which samples are compared says `data.agreement`."""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hora.comm.codec import decode, encode
from hora.comm.parcel import flat_bytes
from hora.errors import ConfigError

_NUMBERS: Final = 64
"""That are told of an array at most, and arrays of which some are told."""
_TOLERANCE: Final = 0.01
"""Of the largest number: how far apart two may be that kinds of processors have computed."""
_A_FLOAT: Final = {"$float": None}


class Opening(NamedTuple):
    """What is told of a sample: a digest of all but its floating-point numbers, and some of these."""

    digest: str
    numbers: list[list[float]]

    @classmethod
    def of(cls, sample: Any) -> "Opening | None":
        """None where `sample` is not made of values, tensors, arrays and collections of them."""
        try:
            skeleton, tensors = encode(sample)
        except ConfigError:
            return None
        numbers: list[list[float]] = []
        digest = hashlib.blake2b(json.dumps(_without_floats(skeleton, tensors, numbers)).encode(), digest_size=8)
        for _name, tensor in sorted(tensors.items()):
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            if tensor.is_floating_point():
                places = torch.from_numpy(_places(tensor.numel())).to(tensor.device)
                numbers.append(tensor.detach().reshape(-1)[places].double().tolist())
            else:
                digest.update(flat_bytes(tensor).cpu().numpy().tobytes())
        return cls(digest.hexdigest(), [numbers[place] for place in _places(len(numbers))])

    def is_like(self, other: "Opening") -> bool:
        """Whether both are of one sample, which kinds of processors may compute a little differently."""
        return self.digest == other.digest and all(map(_near, self.numbers, other.numbers))


NOTHING = Opening("", [])
"""Of a stream that gives no sample."""


def unlike_the_first(told: Sequence[Sequence[Any] | None]) -> list[int]:
    """The ranks that told of other samples than rank 0."""
    openings = [None if opening is None else Opening(*opening) for opening in told]
    return [
        rank for rank, theirs in enumerate(openings) if theirs is not None and openings[0] is not None and not theirs.is_like(openings[0])
    ]


def _places(count: int) -> np.ndarray[Any, Any]:
    """Some of `count` places, the first and the last among them; of integers, since floats would round beyond the last."""
    chosen = min(count, _NUMBERS)
    return np.arange(chosen) * (count - 1) // max(chosen - 1, 1)


def _without_floats(branch: Any, tensors: dict[str, Tensor], numbers: list[list[float]]) -> Any:
    """An encoded tree with a mark in place of each float and array of floats, of which some numbers go to `numbers`.

    Dicts are sorted: one that is made of a set has another order in each process.
    """
    if isinstance(branch, list):
        return [_without_floats(item, tensors, numbers) for item in branch]
    if isinstance(branch, dict):
        if "$array" in branch or "$scalar" in branch:
            return _without_float_array(branch, tensors, numbers)
        return {key: _without_floats(branch[key], tensors, numbers) for key in sorted(branch)}
    if isinstance(branch, float):
        numbers.append([branch])
        return _A_FLOAT
    return branch


def _without_float_array(branch: dict[str, Any], tensors: dict[str, Tensor], numbers: list[list[float]]) -> Any:
    dtype = next(iter(branch.values()))[0]
    if np.dtype(dtype).kind != "f":
        return branch
    array = np.asarray(decode(branch, tensors))
    if "$array" in branch:
        del tensors[branch["$array"][2]]
    numbers.append(array.reshape(-1)[_places(array.size)].astype(np.float64).tolist())
    return {"$array": [dtype, list(array.shape)]}


def _near(some: list[float], others: list[float]) -> bool:
    largest = max((abs(number) for number in (*some, *others) if math.isfinite(number)), default=0.0)
    return np.allclose(some, others, rtol=0.0, atol=_TOLERANCE * largest, equal_nan=True)
