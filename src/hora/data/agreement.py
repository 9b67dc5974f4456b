"""Do all ranks deal from the same data? Asked when a loader is made, and of a stream at the beginning of each epoch.

What a data set holds is not looked at, but for the choice of a `Subset`, which is most often drawn at random, as tensors of a `TensorDataset` may be,
of which a few are, and the first sample of a stream, which is another one on each rank where a script deals the samples out itself.
"""

import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from hora import log
from hora.comm.codec import decode, encode
from hora.comm.objects import all_gather_object
from hora.comm.parcel import flat_bytes
from hora.comm.session import is_initialized
from hora.data.role import Role
from hora.errors import CollectiveMismatch, ConfigError

_LOOKED_AT = 1024


def require_same_loader(loader: str, role: Role, facts: Mapping[str, Any], dataset: Any = None) -> None:
    """Compares what decides which samples are in which step, and warns of a TensorDataset whose tensors are others. Collective in a job.

    Raises:
        CollectiveMismatch: on every rank alike; names what differs and the ranks.
    """
    if not role.in_job:
        return
    opening = _opening_of_tensors(dataset)
    gathered = all_gather_object(({**facts, "logical_ranks": role.logical_ranks.count}, None if opening is None else tuple(opening)))
    told: list[Any] = [theirs for theirs, _opening in gathered]
    for rank, theirs in enumerate(told):
        for name in {**told[0], **theirs}:
            if theirs.get(name) != told[0].get(name):
                raise CollectiveMismatch(
                    f"all ranks must make the same {loader}, or samples are lost and others come twice, but {name} is {told[0].get(name)!r} on "
                    f"rank 0 and {theirs.get(name)!r} on rank {rank}; {_remedy(name)}"
                )
    if (odd := _unlike_the_first([opening for _theirs, opening in gathered])) and role.rank == 0:
        log.get_logger().warning(
            "the TensorDataset of this loader holds other samples on ranks %s than on rank 0, so that some are lost and others come twice: seed what "
            "draws or splits them alike on all ranks, and give each the whole data set",
            odd,
        )


def _opening_of_tensors(dataset: Any) -> "Opening | None":
    tensors = through_subsets(dataset, ())[0]
    if type(tensors) is not TensorDataset or len(tensors) == 0:
        return None
    return Opening.of([list(tensors[place]) for place in sorted({0, len(tensors) // 3, 2 * len(tensors) // 3, len(tensors) - 1})])


def _unlike_the_first(told: Sequence[Sequence[Any] | None]) -> list[int]:
    """The ranks that told of other samples than rank 0."""
    openings = [None if opening is None else Opening(*opening) for opening in told]
    return [
        rank for rank, theirs in enumerate(openings) if theirs is not None and openings[0] is not None and not theirs.is_like(openings[0])
    ]


def _remedy(name: str) -> str:
    if name == "subset":
        return "give random_split a generator that is seeded alike, or choose the samples on one rank and broadcast them"
    return "the loader deals samples to ranks itself: give it the whole data set and the same arguments everywhere"


def choice_of(dataset: Any) -> str | None:
    """A digest of which samples a `Subset` holds, of those at a thousand places; None of other data sets."""
    if type(dataset) is not Subset:
        return None
    size = len(dataset)
    places = range(size) if size <= _LOOKED_AT else [place * (size - 1) // (_LOOKED_AT - 1) for place in range(_LOOKED_AT)]
    chosen = through_subsets(dataset, places)[1]
    text = repr([index.__index__() if hasattr(index, "__index__") else index for index in chosen])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def through_subsets(dataset: Any, indices: Sequence[int]) -> tuple[Any, Sequence[int]]:
    """The data set that `Subset`s around it choose from, and the indices there."""
    while type(dataset) is Subset:
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    return dataset, indices


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

_NUMBERS = 64
_TOLERANCE = 0.01
_A_FLOAT = {"$float": None}


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


def require_same_stream(role: Role, epoch: int, first: Opening | None) -> None:
    """Compares what ranks read first of a stream. Collective in a job; nothing is compared when it is over, nor in a thread beside the main one.

    Args:
        role: for whom the loader deals.
        epoch: number of the epoch, for the error.
        first: of the first sample; None if nothing can be told of it, NOTHING if there is none.

    Raises:
        CollectiveMismatch: on every rank alike; names the ranks.
    """
    if not (role.in_job and is_initialized()) or threading.current_thread() is not threading.main_thread():
        return
    if odd := _unlike_the_first(all_gather_object(None if first is None else tuple(first))):
        raise CollectiveMismatch(
            f"a stream must give the same samples on all ranks, for the loader keeps of each global batch this rank's part and leaves out the rest, "
            f"but the first sample of epoch {epoch} is another one on ranks {odd} than on rank 0; let the data set give all samples on every rank, "
            "whatever its rank, put nothing into them that is a rank's own, such as a path on its node, and draw random numbers from the global "
            "generators of torch, random or NumPy, which the loader seeds alike"
        )
