"""A sampler whose epoch can go on in the middle, on another number of ranks."""

import itertools
import random
from collections.abc import Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import Sampler
from typing_extensions import override

from hora.hvd.basics import rank, size


class ElasticSampler(Sampler[int]):
    """Deals the samples of an epoch that have not been processed to the ranks; the order is Horovod's.

    A sample comes once in an epoch, whatever resets there are in it, if batches are recorded before they are committed; so that all ranks have
    equally many, fewer than `size` of them come twice, in its last step. Call `set_epoch` when an epoch has ended, not when it begins.

    Args:
        dataset: has a length.
        shuffle: whether each epoch has an order of its own.
        seed: of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which nothing has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 (Horovod's)
        """Each rank has processed `batch_size` samples more."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, for any number of ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` stands, on the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deals what has not been processed to the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = order_of(len(self.dataset), self.seed + self.epoch if self.shuffle else None)
        self.remaining_indices = order[self.processed_num :]
        # Of the epoch, not of what remains: an epoch that is resumed on as many ranks ends as it would have ended.
        self._filling = order[: self.num_replicas]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(deal(self.remaining_indices, self._filling, self.rank, self.num_replicas))

    def __len__(self) -> int:
        return self.num_samples


def order_of(length: int, seed: int | None) -> list[int]:
    """The order of an epoch of `length` samples; as they stand, without a seed."""
    indices = list(range(length))
    if seed is not None:
        random.Random(seed).shuffle(indices)
    return indices


def deal(indices: Sequence[int], filling: Sequence[int], rank: int, size: int) -> list[int]:
    """What `rank` of `size` gets of `indices`, in turn; some of `filling` at the end, so that all get equally many."""
    total = -(-len(indices) // size) * size
    return list(itertools.islice(itertools.chain(indices, itertools.cycle(filling)), rank, total, size))
