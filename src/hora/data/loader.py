"""hora.DataLoader: torch's DataLoader, dealing global batches to ranks.

A thin shell: it checks what the user gave and picks where steps come from (a data set with an index, or a stream). Which sample goes where
is `plan.samples`, loading is torch's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Protocol, Self, Unpack

from torch.utils.data import BatchSampler, IterableDataset, default_collate
from torch.utils.data import DataLoader as TorchLoader

from hora import log
from hora.data.agreement import require_same_loader
from hora.data.iterable import BatchReader, DealtStream, SampleReader, StreamSource
from hora.data.map_style import MapSource
from hora.data.orders import DrawnOrders, Orders, PlannedOrders
from hora.data.role import Role
from hora.data.steps import Step, StepLoader
from hora.data.workers import TorchOptions, check_options
from hora.errors import ConfigError
from hora.plan.samples import SamplePlan


class Source(Protocol):
    """Where steps come from."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What decides which samples are in which step."""

    @property
    def num_steps(self) -> int | None:
        """Steps of an epoch; None when nobody knows before its end."""

    def steps(self, epoch: int, first: int, drawn: Callable[[str], None]) -> Iterator[Step]:
        """This rank's part of the steps of `epoch` from `first` on; `drawn` is told the digest of an order that somebody drew."""


class DataLoader(StepLoader):
    """Yields the steps of an epoch, each an iterable of this rank's micro-batches; iterated again, those of the next epoch.

    The global batch of a step is the same set of samples in the same order whatever the number of ranks, workers and the micro-batch size. No
    sample is padded or comes twice in an epoch. Every rank has the same number of steps; in the last one it may have no micro-batch.

    Collective: made on all ranks, with the same data and arguments, and iterated on all.

    Args:
        dataset: anything with `__getitem__` and `__len__`, or an iterable. An iterable is read whole by every rank.
        global_batch_size: samples of one update, over all ranks and micro-batches.
        micro_batch_size: most samples of one forward and backward; by default a rank's whole part of the step.
        shuffle: another order each epoch; by default True for a data set with an index. An iterable comes in its own order.
        seed: chooses the orders, and the random numbers that data sets draw.
        drop_last: leave out the last global batch when it is smaller, instead of keeping it with its true size.
        sampler: draws the indices of an epoch, for all ranks, in place of shuffling. It may draw from the global generators or from its
            `generator`: both are seeded by (seed, epoch) meanwhile.
        batch_sampler: draws global batches, in place of `global_batch_size`, `shuffle`, `sampler` and `drop_last`.
        rank: whose part to yield, together with `world_size`; by default this process's.
        world_size: number of ranks.
        logical_ranks: number of parts that a global batch is dealt to, for runs that must not depend on `world_size`.
        torch_options: `num_workers`, `collate_fn`, `pin_memory`, `timeout` (120 s with workers), `worker_init_fn`,
            `multiprocessing_context` (forkserver once CUDA is in use), `prefetch_factor` and `persistent_workers` of torch's DataLoader.

    Attributes:
        dataset: the first argument.

    Raises:
        ConfigError: the data set is empty or has no length, a size is below 1, or arguments exclude each other.
        CollectiveMismatch: ranks have data of another length, another `Subset`, or other settings; on every rank alike.
        DataError: while iterating: a worker died or did not answer in time.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        logical_ranks: int | None = None,
        **torch_options: Unpack[TorchOptions],
    ):
        super().__init__()
        check_options(torch_options)
        if isinstance(dataset, TorchLoader | StepLoader):
            raise ConfigError("the first argument must be a data set, but is a loader already; use hora.DataLoader.from_loader(loader)")
        stream = _is_stream(dataset)
        _require_sizes(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
        _require_compatible(stream, global_batch_size, shuffle, drop_last, sampler, batch_sampler)
        role = Role.find(rank, world_size, logical_ranks)
        self.dataset = dataset
        self._source: Source
        if stream:
            reader = SampleReader(global_batch_size or 0, drop_last, torch_options.get("collate_fn"))
            self._source = StreamSource(DealtStream(dataset, reader, role, seed, micro_batch_size), torch_options)
            require_same_loader("DataLoader", role, self._source.facts)
            return
        orders: Orders
        num_samples = _length(dataset)
        facts = {"num_samples": num_samples, "global_batch_size": global_batch_size, "seed": seed, "shuffle": None, "drop_last": drop_last}
        if sampler is not None:
            batch_sampler = BatchSampler(sampler, global_batch_size or 0, drop_last)
        if batch_sampler is not None:
            orders = DrawnOrders(batch_sampler, facts, seed, role.in_job)
        else:
            orders = PlannedOrders(
                SamplePlan(num_samples, global_batch_size or 0, seed, shuffle is not False, drop_last), partial(_length, dataset)
            )
            _warn_of_idle_ranks(role, min(num_samples, global_batch_size or 0))
        self._source = MapSource(dataset, orders, role, seed, micro_batch_size, torch_options)
        require_same_loader("DataLoader", role, self._source.facts, dataset)

    @classmethod
    def from_loader(
        cls,
        loader: Iterable[Any],
        *,
        micro_batch_size: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        logical_ranks: int | None = None,
    ) -> Self:
        """A loader whose global batches are the batches of `loader`.

        Of a torch DataLoader over a data set with an index only the batch sampler is used, and each rank loads its own samples. Any other
        iterable of batches is iterated whole by every rank, and each batch cut along its first dimension.

        Args:
            loader: a torch DataLoader, or an iterable that yields batches of tensors, arrays or lists in dicts, lists or tuples.
            micro_batch_size: most samples of one forward and backward.
            seed: chooses the random numbers that are drawn meanwhile.
            rank: whose part to yield, together with `world_size`; by default this process's.
            world_size: number of ranks.
            logical_ranks: number of parts that a global batch is dealt to.
        """
        if isinstance(loader, TorchLoader) and loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
            return cls(
                loader.dataset, batch_sampler=loader.batch_sampler, micro_batch_size=micro_batch_size, seed=seed, rank=rank,
                world_size=world_size, logical_ranks=logical_ranks, **_options_of(loader),
            )  # fmt: skip
        _require_sizes(micro_batch_size=micro_batch_size)
        made = cls.__new__(cls)
        StepLoader.__init__(made)
        made.dataset = loader
        role = Role.find(rank, world_size, logical_ranks)
        made._source = StreamSource(DealtStream(loader, BatchReader(), role, seed, micro_batch_size), {})
        require_same_loader("DataLoader", role, made._source.facts)
        return made

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank.

        Raises:
            TypeError: nobody knows before the end of the epoch.
        """
        if self._source.num_steps is None:
            raise TypeError(f"the number of steps of this {type(self).__name__} is known at the end of an epoch only")
        return self._source.num_steps

    def _steps(self, epoch: int, first: int) -> Iterator[Step]:
        return self._source.steps(epoch, first, self._require_order)

    def _facts(self) -> Mapping[str, Any]:
        return self._source.facts


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"a data set with an index must have a length, but this {type(dataset).__name__} has none: give it a __len__, or make it an "
            "IterableDataset"
        ) from error


def _require_sizes(**sizes: Any) -> None:
    problems = [
        f"{name} must be an integer of at least 1, but is {size!r} instead"
        for name, size in sizes.items()
        if size is not None and not (isinstance(size, Integral) and int(size) >= 1)
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _require_compatible(
    stream: bool, global_batch_size: int | None, shuffle: bool | None, drop_last: bool, sampler: Any, batch_sampler: Any
) -> None:
    given = {"global_batch_size": global_batch_size, "shuffle": shuffle, "drop_last": drop_last or None, "sampler": sampler}
    problems = []
    if batch_sampler is not None:
        others = [name for name, value in given.items() if value is not None]
        problems += [f"batch_sampler decides what is in a global batch: it does not go with {', '.join(others)}"] if others else []
    elif global_batch_size is None:
        problems.append("global_batch_size must be given: the samples of one update, over all ranks")
    if sampler is not None and shuffle:
        problems.append("sampler decides the order: it does not go with shuffle=True")
    if stream and (shuffle or sampler is not None or batch_sampler is not None):
        problems.append("a data set without an index comes in its own order: it does not go with shuffle=True, sampler or batch_sampler")
    if problems:
        raise ConfigError("; ".join(problems))


def _warn_of_idle_ranks(role: Role, largest_step: int) -> None:
    ranks = range(role.logical_ranks.world_size)
    idle = [rank for rank in ranks if role.logical_ranks.played_by(rank).start >= largest_step]
    if idle and role.rank == 0:
        log.get_logger().warning(
            "%d of %d ranks never get a sample: the largest global batch has %d, dealt to %d logical ranks",
            len(idle), len(ranks), largest_step, role.logical_ranks.count,
        )  # fmt: skip


def _options_of(loader: TorchLoader[Any]) -> TorchOptions:
    options = TorchOptions(
        num_workers=loader.num_workers,
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
        options["multiprocessing_context"] = loader.multiprocessing_context
    if loader.timeout:
        options["timeout"] = loader.timeout
    return options
