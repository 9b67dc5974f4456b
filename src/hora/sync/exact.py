"""What an update of exact mode does besides summing in order: whose random numbers are in force, and whose running statistics.

A window goes through the logical ranks that this rank plays, in turn. Each draws random numbers seeded by (seed, epoch, step, logical rank,
micro-step), and each starts from the buffers that the step began with; what normalisation layers have made of them is combined in the end,
weighed by samples, in one order. So neither depends on who plays whom.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _NormBase

from hora.comm.exactness import Exact
from hora.comm.flat import all_reduce_flat
from hora.comm.randomness import lent_generators, seed_generators
from hora.comm.torch_private import version_of
from hora.errors import ConfigError
from hora.plan.logical import LogicalRanks
from hora.plan.seeds import derive_key, seed_at
from hora.sync.batch_norm import SyncBatchNorm
from hora.sync.control import LEAST_WEIGHT

_MICRO_STEPS = 2**32
"""Micro-steps that a logical rank may have in a step, as far as their seeds are concerned."""


@runtime_checkable
class DealtStep(Protocol):
    """A step of a loader of Hora's: which logical rank each micro-batch belongs to, and which step it is."""

    epoch: int
    index: int
    logical_ranks: Sequence[int]


def require_dealt(step: Iterable[Any]) -> DealtStep:
    """`step`, if it says whose micro-batches it holds.

    Raises:
        ConfigError: it does not.
    """
    if isinstance(step, DealtStep):
        return step
    raise ConfigError(
        f"in exact mode micro_batches takes a step of hora.DataLoader or hora.TextStream, which says what logical rank a micro-batch belongs to, "
        f"but got {type(step).__name__} instead; change batches inside the loop, and keep them for a second loop with step.hold()"
    )


def require_exact_model(model: nn.Module) -> None:
    """Refuses layers whose result depends on the number of ranks.

    Raises:
        ConfigError: names the first one.
    """
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm | TorchSyncBatchNorm):
            raise ConfigError(
                f"exact mode normalises per logical rank, but {name or 'the model'} is a SyncBatchNorm, whose batch is that of all ranks; use "
                "BatchNorm"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"exact mode sums dense gradients in order, but {name or 'the model'} is an embedding with sparse=True, whose rows are added in "
                "no fixed order; use sparse=False"
            )


def micro_steps(logical_ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """For each micro-batch its logical rank, and its number among those of that rank."""
    for logical_rank, group in itertools.groupby(logical_ranks):
        for micro_step, _ in enumerate(group):
            yield logical_rank, micro_step


class RandomTurns:
    """The random numbers of each micro-step: those of torch on CPU and GPU, of `random` and of NumPy.

    On a GPU generators of this object's own take the place of torch's, for a CUDA graph draws from what it was captured with, and can be given
    a new seed between two replays only: a window that is captured has a generator for each micro-step.
    """

    def __init__(self, exact: Exact, device: torch.device, name: str):
        self._exact = exact
        self._device = device
        self._name = name
        self._key = 0
        self._on_gpu = _Lent(device) if device.type == "cuda" else None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """After the `with` block the generators are where they were before, so that what is drawn between steps is the same on all ranks."""
        with lent_generators(), self._on_gpu.lent() if self._on_gpu is not None else nullcontext():
            yield

    def begin(self, step: DealtStep) -> None:
        """A step begins."""
        self._key = self._key_of(step)

    def enter(self, logical_rank: int, micro_step: int) -> None:
        """Seeds the generators for one micro-step."""
        seed = _seed(self._key, logical_rank, micro_step)
        seed_generators(seed)
        if self._on_gpu is not None:
            self._on_gpu.enter(seed)

    @contextmanager
    def captured(self, graph: torch.cuda.CUDAGraph, num_micro_steps: int) -> Iterator[Callable[[Any], None]]:
        """Inside the `with` block a window is captured into `graph`; gives what is to be called with a step before its replay."""
        assert self._on_gpu is not None
        with self._on_gpu.captured(graph, num_micro_steps) as generators:

            def reseed(step: DealtStep) -> None:
                key = self._key_of(step)
                for generator, place in zip(generators, micro_steps(step.logical_ranks), strict=True):
                    generator.manual_seed(_seed(key, *place))

            yield reseed

    def _key_of(self, step: DealtStep) -> int:
        return derive_key(f"exact {self._name}", self._exact.seed, step.epoch, step.index)


class _Lent:
    """Generators in the place of the one that torch draws from on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = torch.Generator(device)
        self._to_capture: Iterator[torch.Generator] | None = None

    @property
    def _torchs(self) -> torch.Generator:
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device() if self._device.index is None else self._device.index]

    @contextmanager
    def lent(self) -> Iterator[None]:
        before = self._torchs.graphsafe_get_state()
        try:
            yield
        finally:
            self._torchs.graphsafe_set_state(before)

    def enter(self, seed: int) -> None:
        if self._to_capture is None:
            self._torchs.graphsafe_set_state(self._own)
            self._own.manual_seed(seed)
        else:
            self._torchs.graphsafe_set_state(next(self._to_capture))

    @contextmanager
    def captured(self, graph: torch.cuda.CUDAGraph, number: int) -> Iterator[list[torch.Generator]]:
        generators = [torch.Generator(self._device) for _ in range(number)]
        for generator in generators:
            graph.register_generator_state(generator)
        self._to_capture = iter(generators)
        try:
            yield generators
        finally:
            self._to_capture = None


def _seed(key: int, logical_rank: int, micro_step: int) -> int:
    return seed_at(key, logical_rank * _MICRO_STEPS + micro_step)


class NormBuffers:
    """The running statistics of a model's normalisation layers, over the logical ranks of one window."""

    def __init__(self, model: nn.Module, logical_ranks: LogicalRanks, device: torch.device):
        self._modules = [module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats]
        known = {id(buffer) for module in self._modules for buffer in module.buffers(recurse=False)}
        self._others = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in known}
        self._logical_ranks = logical_ranks
        self._device = device
        self._versions: dict[str, int] = {}
        self._training: list[_NormBase] = []
        self._steps = torch.zeros(0, dtype=torch.float64, device=device)
        self._before: list[list[Tensor]] = []
        self._leaves: dict[int, Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Notes what the window starts from."""
        self._versions = {name: version_of(buffer) for name, buffer in self._others.items()}
        self._training = [module for module in self._modules if module.training]
        self._before = [[buffer.clone() for buffer in module.buffers(recurse=False)] for module in self._training]
        self._leaves = {}
        self._steps = torch.zeros(len(self._training), dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def leave(self, logical_rank: int) -> None:
        """Takes what `logical_rank` has made of the buffers, and puts back what it found."""
        if not self._training:
            return
        statistics = [buffer for module in self._training for buffer in _statistics(module)]
        self._leaves[logical_rank] = torch.cat([buffer.reshape(-1).double() for buffer in statistics])
        steps = [_num_batches(module) - before[-1] for module, before in zip(self._training, self._before, strict=True)]
        self._steps = torch.maximum(self._steps, torch.stack(steps).double())
        self._put_back()

    @torch.no_grad()
    def combine(self, weights: Mapping[int, float | Tensor], total_weight: Tensor) -> None:
        """Gives every rank the mean of the logical ranks' statistics. Collective.

        Raises:
            ConfigError: forward has changed a buffer of another kind.
        """
        changed = [name for name, buffer in self._others.items() if version_of(buffer) != self._versions[name]]
        if changed:
            raise ConfigError(
                f"exact mode knows how to combine the running statistics of normalisation layers, but forward has changed the buffer {changed[0]!r}; "
                "keep what is updated in a parameter without gradient, or switch exact mode off"
            )
        if not self._training:
            return
        statistics = [buffer for module in self._training for buffer in _statistics(module)]
        sizes = [buffer.numel() for buffer in statistics]
        count = self._logical_ranks.count
        table = torch.zeros(count, sum(sizes) + len(self._training), dtype=torch.float64, device=self._device)
        for logical_rank, leaf in self._leaves.items():
            table[logical_rank, : sum(sizes)] = leaf * weights.get(logical_rank, 0.0) + 0.0  # no -0.0, which a sum over ranks would lose
            table[logical_rank, sum(sizes) :] = self._steps
        all_reduce_flat(table.view(-1), waits=True).wait()  # every entry is one rank's, the others add zero
        sums = self._logical_ranks.total([(range(row, row + 1), part) for row, part in enumerate(table)], torch.add)
        means = (sums[: sum(sizes)] / total_weight).split(sizes)
        steps = table[:, sum(sizes) :].amax(0)
        anything = total_weight > LEAST_WEIGHT
        for buffer, mean in zip(statistics, means, strict=True):
            buffer.copy_(torch.where(anything, mean.view(buffer.shape), buffer.double()))
        for module, step in zip(self._training, steps, strict=True):
            _num_batches(module).add_(step.long())

    def _put_back(self) -> None:
        for module, before in zip(self._training, self._before, strict=True):
            for buffer, value in zip(module.buffers(recurse=False), before, strict=True):
                buffer.copy_(value)


def _num_batches(module: _NormBase) -> Tensor:
    assert module.num_batches_tracked is not None
    return module.num_batches_tracked


def _statistics(module: _NormBase) -> list[Tensor]:
    assert module.running_mean is not None
    assert module.running_var is not None
    return [module.running_mean, module.running_var]
