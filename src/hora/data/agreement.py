"""Do all ranks deal from the same data? Asked when a loader is made, and of a stream at the beginning of each epoch.

What a data set holds is not looked at, but for the choice of a `Subset`, which is most often drawn at random, as tensors of a `TensorDataset` may be,
of which a few are, and the first sample of a stream, which is another one on each rank where a script deals the samples out itself.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Subset, TensorDataset

from hora import log
from hora.comm.objects import all_gather_object
from hora.comm.session import is_initialized
from hora.data.opening import Opening, unlike_the_first
from hora.data.role import Role
from hora.errors import CollectiveMismatch

_LOOKED_AT = 1024


def require_same_loader(loader: str, role: Role, facts: Mapping[str, Any], dataset: Any = None) -> None:
    """Compares what decides which samples are in which step, and warns of a TensorDataset whose tensors are others. Collective in a job.

    Raises:
        CollectiveMismatch: on every rank alike; names what differs and the ranks.
    """
    if not role.in_job:
        return
    opening = _opening_of_tensors(dataset)
    mine = {**facts, "logical_ranks": role.logical_ranks.count}, None if opening is None else tuple(opening)
    gathered = all_gather_object(mine, name=f"what a {loader} was given")
    told: list[Any] = [theirs for theirs, _opening in gathered]
    for rank, theirs in enumerate(told):
        for name in {**told[0], **theirs}:
            if theirs.get(name) != told[0].get(name):
                raise CollectiveMismatch(
                    f"all ranks must make the same {loader}, or samples are lost and others come twice, but {name} is {told[0].get(name)!r} on "
                    f"rank 0 and {theirs.get(name)!r} on rank {rank}; {_remedy(name)}"
                )
    if (odd := unlike_the_first([opening for _theirs, opening in gathered])) and role.rank == 0:
        log.get_logger().warning(
            "the TensorDataset of this loader holds other samples on ranks %s than on rank 0, so that some are lost and others come twice: seed what "
            "draws or splits them alike on all ranks, and give each the whole data set",
            odd,
        )


def _opening_of_tensors(dataset: Any) -> Opening | None:
    tensors = through_subsets(dataset, ())[0]
    if type(tensors) is not TensorDataset or len(tensors) == 0:
        return None
    return Opening.of([list(tensors[place]) for place in sorted({0, len(tensors) // 3, 2 * len(tensors) // 3, len(tensors) - 1})])


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
    if odd := unlike_the_first(all_gather_object(None if first is None else tuple(first), name=f"what a stream begins epoch {epoch} with")):
        raise CollectiveMismatch(
            f"a stream must give the same samples on all ranks, for the loader keeps of each global batch this rank's part and leaves out the rest, "
            f"but the first sample of epoch {epoch} is another one on ranks {odd} than on rank 0; let the data set give all samples on every rank, "
            "whatever its rank, put nothing into them that is a rank's own, such as a path on its node, and draw random numbers from the global "
            "generators of torch, random or NumPy, which the loader seeds alike"
        )
