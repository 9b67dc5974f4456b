"""Data sets without an index, and global batches that somebody else makes: each rank reads the whole stream and keeps its part.

So the global batches are the same whatever the number of ranks, every rank has the same number of steps, and nothing is lost; the cost is that
each rank reads everything. What is dear should therefore happen in `collate_fn`, which sees this rank's samples only. The stream must
be the same on every rank: it may draw from the global generators, which are seeded alike, but not look at its rank. Ranks compare the first sample
of each epoch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

from torch.utils.data import IterableDataset, default_collate

from hora import log
from hora.comm.randomness import RandomNumbers, lent_generators, seed_generators
from hora.data.agreement import require_same_stream
from hora.data.opening import NOTHING, Opening
from hora.data.role import Role
from hora.data.splitting import batch_size, part_of
from hora.data.steps import Loaded, Step
from hora.data.workers import TorchOptions, WorkerPool
from hora.errors import ConfigError
from hora.plan.samples import MicroStep, deal
from hora.plan.seeds import derive_key, seed_at

_PAST_THE_END = object()


class GlobalBatch(NamedTuple):
    """What the stream gave for one step: how many samples, how to have some of them as one batch, and the first as it came."""

    size: int
    take: Callable[[range], Any]
    first: Callable[[], Any]


class Dealt(NamedTuple):
    """A rank's part of a step; with the first step that is handed out also what is told of the first sample of the epoch."""

    micro_batches: list[tuple[MicroStep, Any]]
    opening: Opening | None


class Reader(Protocol):
    """Turns a stream into global batches."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What decides which samples are in which global batch."""

    def num_steps(self, stream: Iterable[Any]) -> int | None:
        """How many global batches `stream` makes; None when nobody knows."""

    def read(self, stream: Iterator[Any]) -> GlobalBatch | None:
        """The next global batch; None at the end."""


@dataclass(frozen=True)
class SampleReader:
    """Puts `global_batch_size` samples together; the last batch is smaller, or dropped."""

    global_batch_size: int
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None

    @property
    def facts(self) -> Mapping[str, Any]:
        """The settings."""
        return {"global_batch_size": self.global_batch_size, "drop_last": self.drop_last}

    def num_steps(self, stream: Iterable[Any]) -> int | None:  # noqa: ARG002
        """Unknown: streams seldom know their length, and then often a wrong one."""
        return None

    def read(self, stream: Iterator[Any]) -> GlobalBatch | None:
        """The next samples of the stream."""
        samples = list(islice(stream, self.global_batch_size))
        if not samples or (self.drop_last and len(samples) < self.global_batch_size):
            return None
        collate = self.collate or default_collate
        return GlobalBatch(len(samples), lambda part: collate(samples[part.start : part.stop]), lambda: samples[0])


@dataclass(frozen=True)
class BatchReader:
    """Takes each item of the stream for a global batch, and cuts it along the first dimension."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """None: the loader behind the stream decides."""
        return {}

    def num_steps(self, stream: Iterable[Any]) -> int | None:
        """The length of `stream`, if it has one."""
        try:
            return len(stream)  # type: ignore[arg-type]
        except TypeError:
            return None

    def read(self, stream: Iterator[Any]) -> GlobalBatch | None:
        """The next item of the stream."""
        batch = next(stream, _PAST_THE_END)
        if batch is _PAST_THE_END:
            return None
        size = batch_size(batch)
        if size == 0:
            raise ConfigError("each global batch must hold at least one sample, but the loader gave an empty one")
        return GlobalBatch(size, lambda part: part_of(batch, part, size), lambda: part_of(batch, range(1), size))


@dataclass
class DealtStream(IterableDataset[Dealt]):
    """A rank's part of the steps of a stream.

    Attributes:
        epoch: which epoch the next iteration is of.
        first: the step that it begins with; those before it are read and left out.
    """

    source: Iterable[Any]
    reader: Reader
    role: Role
    seed: int
    micro_batch_size: int | None
    epoch: int = 0
    first: int = 0

    def __iter__(self) -> Iterator[Dealt]:
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.epoch)
        reading = RandomNumbers(derive_key("stream", self.seed, self.epoch))
        with reading.in_force():
            stream = iter(self.source)
        step = position = 0
        opening = None
        while True:
            with reading.in_force():
                batch = self.reader.read(stream)
            if batch is None:
                return
            if step == 0:
                opening = Opening.of(batch.first())
            if step >= self.first:
                yield Dealt(self._keep(batch, range(position, position + batch.size)), opening if step == self.first else None)
            step, position = step + 1, position + batch.size

    def _keep(self, batch: GlobalBatch, positions: range) -> list[tuple[MicroStep, Any]]:
        key = derive_key("samples", self.seed, self.epoch)
        kept = []
        for micro_step in deal(positions, self.role.logical_ranks, self.role.rank, self.micro_batch_size):
            start, stop = micro_step.positions.start, micro_step.positions.stop
            with lent_generators():
                seed_generators(seed_at(key, -1 - start))
                kept.append((micro_step, batch.take(range(start - positions.start, stop - positions.start))))
        return kept


class StreamSource:
    """Steps of a data set without an index."""

    def __init__(self, stream: DealtStream, options: TorchOptions):
        if options.get("num_workers", 0) > 1:
            raise ConfigError(
                f"num_workers must be 0 or 1 for a data set without an index, but is {options['num_workers']} instead: each worker would read "
                "the whole stream; do what is dear in collate_fn, or use a data set with an index"
            )
        if options.get("persistent_workers"):
            raise ConfigError("persistent_workers must be off for a data set without an index: its worker learns the epoch when it starts")
        # That of another kind is not tried: torch's loader draws a random number then, and starts its workers.
        kept = isinstance(stream.source, IterableDataset) and iter(stream.source) is iter(stream.source)
        if kept or (isinstance(stream.source, Iterator) and iter(stream.source) is stream.source):
            raise ConfigError(
                f"a data set must be iterable once for each epoch, but this {type(stream.source).__name__} can be read only once; give an object "
                "whose __iter__ begins anew"
            )
        self._stream = stream
        self._pool = WorkerPool(stream, None, options, derive_key("workers", stream.seed, stream.role.rank))

    @property
    def facts(self) -> Mapping[str, Any]:
        """What decides which samples are in which step."""
        return {"seed": self._stream.seed, **self._stream.reader.facts}

    @property
    def num_steps(self) -> int | None:
        """Steps of an epoch, if the stream gives its global batches and has a length."""
        return self._stream.reader.num_steps(self._stream.source)

    def steps(self, epoch: int, first: int, drawn: Callable[[str], None]) -> Iterator[Step]:  # noqa: ARG002
        """This rank's part of the steps of `epoch` from `first` on, in the stream's own order. Collective in a job: its first sample is compared."""
        self._stream.epoch, self._stream.first = epoch, first
        described = f"a micro-batch of {self._stream.role.prefix} in epoch {epoch}"
        index = first - 1
        for index, (micro_batches, opening) in enumerate(self._pool.batches(lambda: described), first):
            if index == first:
                require_same_stream(self._stream.role, epoch, opening)
            micro_steps = [micro_step for micro_step, _batch in micro_batches]
            loaded = iter([Loaded(batch, micro_step.positions) for micro_step, batch in micro_batches])
            yield Step(epoch, index, micro_steps, loaded, of_job=self._stream.role.in_job)
        if index < first:
            require_same_stream(self._stream.role, epoch, NOTHING)
            if first == 0 and self._stream.role.rank == 0:
                log.get_logger().warning("the data set gave no global batch in epoch %d, so that the epoch has no step", epoch)
