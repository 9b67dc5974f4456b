"""Data sets with an index: requests for micro-batches, fetched by torch's loader here or in worker processes.

Each sample is loaded with random numbers of its own, seeded by (seed, epoch, position in the epoch): augmentation repeats neither over epochs
nor over ranks or workers, and a sample looks the same whatever the number of ranks, workers and micro-batches.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from hora.comm.randomness import fingerprint, lent_generators, seed_generators
from hora.data.agreement import choice_of, through_subsets
from hora.data.orders import Orders
from hora.data.role import Role
from hora.data.steps import Loaded, Step
from hora.data.workers import TorchOptions, WorkerPool
from hora.plan.samples import Order, deal
from hora.plan.seeds import derive_key, seed_at


class Request(NamedTuple):
    """A micro-batch to be loaded; `key` belongs to (seed, epoch)."""

    step: int
    positions: range
    indices: Sequence[int]
    key: int

    @property
    def seed(self) -> int:
        """Seed of what is drawn for the micro-batch as a whole; places before the first one belong to no sample."""
        return seed_at(self.key, -1 - self.positions.start)


class Dealer:
    """The requests of one rank, for torch's loader to iterate.

    Attributes:
        in_flight: the requests that have been made and not yet answered, in order.
    """

    def __init__(self, role: Role, micro_batch_size: int | None):
        self.in_flight: deque[Request] = deque()
        self._role, self._micro_batch_size = role, micro_batch_size
        self._order: Order | None = None
        self._first = 0
        self._key = 0

    def begin(self, order: Order, first: int, key: int) -> None:
        """Makes the next iteration that of the steps of `order` from `first` on."""
        self._order, self._first, self._key = order, first, key

    def __iter__(self) -> Iterator[Request]:
        assert self._order is not None
        self.in_flight.clear()
        for step in range(self._first, self._order.num_steps):
            for micro_step in deal(self._order.positions(step), self._role.logical_ranks, self._role.rank, self._micro_batch_size):
                positions = micro_step.positions
                request = Request(step, positions, self._order.indices(positions), self._key)
                self.in_flight.append(request)
                yield request


class Fetcher:
    """Answers requests with collated micro-batches; what torch's loader takes for the data set."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None):
        self._dataset, self._collate = dataset, collate
        self._draws = False  # whether the data set has been seen to draw random numbers

    def __getitems__(self, request: Request) -> Any:
        """Loads and collates one micro-batch; torch's loader calls it by this name."""
        dataset, indices = through_subsets(self._dataset, request.indices)
        if type(dataset) is TensorDataset and self._collate is None:
            chosen = torch.as_tensor(indices, device="cpu")
            chosen = torch.where(chosen < 0, chosen + len(dataset), chosen)  # from the end, as a list takes them
            return [tensor.index_select(0, chosen.to(tensor.device)) for tensor in dataset.tensors]
        with lent_generators() if get_worker_info() is None else nullcontext():  # a worker has no other use for them
            seed_generators(request.seed)
            if callable(getattr(dataset, "__getitems__", None)):  # loads many at once: what it draws belongs to the micro-batch
                samples = list(dataset.__getitems__(list(indices)))
            else:
                samples = self._load(dataset, indices, request)
                seed_generators(request.seed)
            return (self._collate or default_collate)(samples)

    def _load(self, dataset: Any, indices: Sequence[int], request: Request) -> list[Any]:
        """Loads samples one by one, each with its own seed.

        Seeding costs more than a simple data set takes for a sample. As long as the generators are found where the first seed has put them,
        nothing was drawn and the seeds between would have changed nothing.
        """
        seed_generators(seed_at(request.key, request.positions[0]))
        before = fingerprint()
        samples = [dataset[indices[0]]]
        self._draws = self._draws or fingerprint() != before
        for position, index in zip(request.positions[1:], indices[1:], strict=True):
            if self._draws:
                seed_generators(seed_at(request.key, position))
            samples.append(dataset[index])
        if not self._draws and fingerprint() != before:
            self._draws = True
            return self._load(dataset, indices, request)
        return samples


class MapSource:
    """Steps of a data set with an index.

    Attributes:
        facts: what decides the orders.
    """

    def __init__(self, dataset: Any, orders: Orders, role: Role, seed: int, micro_batch_size: int | None, options: TorchOptions):
        self._orders = orders
        choice = choice_of(dataset)
        self.facts: Mapping[str, Any] = orders.facts if choice is None else {**orders.facts, "subset": choice}
        self._role = role
        self._seed = seed
        self._micro_batch_size = micro_batch_size
        self._dealer = Dealer(role, micro_batch_size)
        fetcher = Fetcher(dataset, options.get("collate_fn"))
        self._pool = WorkerPool(fetcher, self._dealer, options, derive_key("workers", seed, role.rank))

    @property
    def num_steps(self) -> int | None:
        """Steps of an epoch, if they are known before."""
        return self._orders.num_steps

    def steps(self, epoch: int, first: int, drawn: Callable[[str], None]) -> Iterator[Step]:
        """This rank's part of the steps of `epoch` from `first` on; `drawn` is told the digest of an order that a sampler drew."""
        order = self._orders.order(epoch)
        if first >= order.num_steps:
            return
        if order.digest is not None:
            drawn(order.digest)
        self._dealer.begin(order, first, derive_key("samples", self._seed, epoch))
        loaded = self._loaded(epoch)
        for index in range(first, order.num_steps):
            micro_steps = deal(order.positions(index), self._role.logical_ranks, self._role.rank, self._micro_batch_size)
            yield Step(epoch, index, micro_steps, loaded, partial(self._counts, order.positions(index)), self._role.in_job)

    def _counts(self, positions: range) -> list[int]:
        ranks = self._role.logical_ranks
        return [len(deal(positions, ranks, rank, self._micro_batch_size)) for rank in range(ranks.world_size)]

    def _loaded(self, epoch: int) -> Iterator[Loaded]:
        for batch in self._pool.batches(lambda: self._describe(epoch)):
            yield Loaded(batch, self._dealer.in_flight.popleft().indices)

    def _describe(self, epoch: int) -> str:
        if not self._dealer.in_flight:
            return f"the first micro-batch of {self._role.prefix} in epoch {epoch}"
        request = self._dealer.in_flight[0]
        shown = ", ".join(map(str, request.indices[:4])) + (", ..." if len(request.indices) > 4 else "")
        return f"the micro-batch of {self._role.prefix} in step {request.step} of epoch {epoch} (samples {shown} of the data set)"
