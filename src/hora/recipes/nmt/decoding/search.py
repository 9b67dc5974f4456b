"""Beam search for a batch of sentences on one device; on a GPU each step is a CUDA graph.

A graph belongs to a shape: sentences, length of the source, and how many symbols there is room for, each rounded up so that few shapes occur. Room
grows with the translations, so that attention reads little more than there is. The host only starts graphs; every few steps it looks whether all
sentences are closed.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hora.recipes.nmt.decoding.beams import Beams, advance, all_closed, collect
from hora.recipes.nmt.decoding.rules import Hypothesis, Rules
from hora.recipes.nmt.models.base import Memory, State, TranslationModel
from hora.recipes.nmt.symbols import PAD

LOOK_EVERY: Final = 4
"""Steps between two looks at the device."""

STEPS_BEFORE_CAPTURE: Final = 20
"""Steps of one shape that run eagerly, so that a shape that is seen once and for few steps is not captured for nothing."""

_FIRST_CAPACITY: Final = 32
_ROWS_MULTIPLE: Final = 32
_LENGTH_MULTIPLE: Final = 16  # which is also what kernels for masks want
_MEMORY_SHARE: Final = 0.25  # of the GPU's, for batches of shapes that were seen


class BeamSearch:
    """Translates batches with the mean of several models. Knows nothing of ranks."""

    def __init__(self, models: Sequence[TranslationModel], rules: Rules, *, capture: bool = True) -> None:
        """Takes models in evaluation mode, on one device and in the precision to compute in; `capture`: whether GPUs run CUDA graphs."""
        self.models = list(models)
        self.rules = rules
        self.device = self.models[0].device
        self._steps = _Graphs(self._advance) if capture and self.device.type == "cuda" else _Eager(self._advance)

    @torch.no_grad()
    def translate(self, source: Tensor) -> list[list[Hypothesis]]:
        """The best translations of each sentence, at most `keep_n`, the best first.

        Args:
            source: `[sentences, s]` int64, PAD on the right, on any device.
        """
        with _kernels(self.device):
            batch = self._begin(source)
            for position in range(self.rules.limit(source.size(1))):
                if position == batch.capacity:
                    batch = self._with_more_room(batch)
                self._steps.step(batch)
                if (position + 1) % LOOK_EVERY == 0 and bool(all_closed(batch.beams, self.rules)):
                    break
        return collect(batch.beams, self.rules, len(source))

    def _advance(self, batch: "_Batch") -> None:
        advance(self.models, batch.states, batch.beams, self.rules)

    def _begin(self, source: Tensor) -> "_Batch":
        sentences, longest = source.shape
        rows, length = self._steps.shape(sentences, longest)
        padded = F.pad(source.to(self.device), (0, length - longest, 0, rows - sentences), value=PAD)
        return self._steps.settle(self._empty([model.encode(padded) for model in self.models], (padded != PAD).sum(1), self._room(longest)))

    def _with_more_room(self, batch: "_Batch") -> "_Batch":
        larger = self._empty(batch.memories, batch.beams.limits, self._room(batch.capacity + 1))  # of like shape; all is overwritten
        larger.load(batch)
        return self._steps.settle(larger)

    def _empty(self, memories: Sequence[Memory], lengths: Tensor, capacity: int) -> "_Batch":
        states = [model.begin(memory, self.rules.beam_size, capacity) for model, memory in zip(self.models, memories, strict=True)]
        dtype = torch.promote_types(memories[0].values.dtype, torch.float32)
        return _Batch(memories, states, Beams.begin(lengths, self.rules, capacity, dtype))

    def _room(self, symbols: int) -> int:
        """A capacity of at least `symbols`, or what `max_steps` needs: powers of two, but for the last."""
        return min(max(_FIRST_CAPACITY, 1 << (symbols - 1).bit_length()), _round_up(self.rules.max_steps, _LENGTH_MULTIPLE))


@dataclass
class _Batch:
    """A batch on its way: everything that a step reads and writes."""

    memories: Sequence[Memory]
    states: Sequence[State]
    beams: Beams
    graph: "torch.cuda.CUDAGraph | None" = None
    eager_steps: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.beams, *(tensor for state in self.states for tensor in state)]

    @property
    def capacity(self) -> int:
        return len(self.beams.trail_symbols)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(tensor.shape for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def load(self, other: "_Batch") -> None:
        """Goes on where `other` stands, which has at most as much room."""
        self.memories = other.memories
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            if mine.shape != theirs.shape:
                mine.zero_()
            mine[tuple(slice(size) for size in theirs.shape)].copy_(theirs)


class _Eager:
    """Carries steps out one kernel after another."""

    def __init__(self, advance: Callable[[_Batch], None]) -> None:
        self.step = advance

    def shape(self, sentences: int, longest: int) -> tuple[int, int]:
        """The shape that a batch of sources is padded to."""
        return sentences, longest

    def settle(self, batch: _Batch) -> _Batch:
        """What is gone on with in the place of `batch`."""
        return batch


class _Graphs:
    """Captures one step of each shape that goes on for long enough, and replays it; as `_Eager` otherwise."""

    def __init__(self, advance: Callable[[_Batch], None]) -> None:
        self._advance = advance
        self._batches: OrderedDict[tuple[torch.Size, ...], _Batch] = OrderedDict()
        # One graph runs at a time, and what they pass from step to step lies outside.
        self._pool = torch.cuda.graph_pool_handle()

    def shape(self, sentences: int, longest: int) -> tuple[int, int]:
        return _round_up(sentences, _ROWS_MULTIPLE), _round_up(longest, _LENGTH_MULTIPLE)

    def settle(self, batch: _Batch) -> _Batch:
        known = self._batches.setdefault(batch.shapes, batch)
        self._batches.move_to_end(batch.shapes)
        if known is not batch:
            known.load(batch)
        self._forget()
        return known

    def step(self, batch: _Batch) -> None:
        if batch.graph is not None:
            batch.graph.replay()
            return
        self._advance(batch)
        batch.eager_steps += 1
        if batch.eager_steps == STEPS_BEFORE_CAPTURE:
            self._capture(batch)

    def _capture(self, batch: _Batch) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._advance(batch)
        batch.graph = graph

    def _forget(self) -> None:
        """Keeps what is in use and as many of the latest shapes as there is memory for."""
        allowed_bytes = _MEMORY_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        while len(self._batches) > 1 and sum(batch.size_bytes for batch in self._batches.values()) > allowed_bytes:
            self._batches.popitem(last=False)


def _kernels(device: torch.device) -> AbstractContextManager[None]:
    """Keeps attention off cuDNN, which makes a plan for each shape anew: that takes longer than a batch of a shape that is seen once."""
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if device.type == "cuda" else nullcontext()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
