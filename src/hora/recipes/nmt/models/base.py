"""What a model that translates can do: score whole translations (training), and go on with many a symbol at a time (decoding).

Decoding keeps a `State`: tensors whose shapes never change, written in place, so that one step can be captured in a CUDA graph. A sentence's
hypotheses stand beside each other, `[sentences, beam]`, and share what comes from the source. Knows nothing of ranks.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn

from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.symbols import PAD

State = tuple[Tensor, ...]
"""What a model keeps between the steps of decoding; a `NamedTuple` of each model's own."""

_EMBEDDING_POWER: Final = -0.5


class Memory(NamedTuple):
    """A source as the decoder sees it.

    Attributes:
        values: `[sentences, s, width]`.
        readable: where the source has symbols, `[sentences, s]`, bool. The first place always counts as one, so that rows of nothing but PAD give
            finite numbers.
    """

    values: Tensor
    readable: Tensor


class TranslationModel(nn.Module, ABC):
    """Predicts the next symbol of a translation at every place."""

    def __init__(self, config: ModelConfig, source_size: int, target_size: int) -> None:
        super().__init__()
        self._arguments = config, source_size, target_size

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def copy_to_decode(self, device: torch.device, dtype: torch.dtype) -> Self:
        """A model of its own with these weights in another type, in evaluation mode; without what training has hung on this one."""
        with torch.device("meta"):
            copy = type(self)(*self._arguments).to(dtype)
        copy.to_empty(device=device).load_state_dict(self.state_dict())
        return copy.requires_grad_(False).eval()

    @property
    def most_places(self) -> float:
        """How long a sequence may be, on either side."""
        return math.inf

    @abstractmethod
    def initialize(self, generator: torch.Generator) -> None:
        """Draws every weight anew from `generator` (of the CPU), in the order of the parameters."""

    @abstractmethod
    def encode(self, source: Tensor) -> Memory:
        """Reads sources `[sentences, s]`, with PAD on the right."""

    @abstractmethod
    def decode(self, memory: Memory, target_in: Tensor) -> Tensor:
        """Logits `[sentences, t, target_size]` of the symbols that follow each of `target_in` `[sentences, t]`."""

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Logits of the symbols that follow each of `target_in`, as translations of `source`.

        Args:
            source: `[sentences, s]` int64, PAD on the right.
            target_in: `[sentences, t]` int64, begins with BOS, PAD on the right.

        Returns:
            `[sentences, t, target_size]`; finite also where all is PAD.
        """
        return self.decode(self.encode(source), target_in)

    @abstractmethod
    def begin(self, memory: Memory, beam_size: int, capacity: int) -> Any:
        """The state before the first symbol, with room for `capacity` of them."""

    @abstractmethod
    def step(self, symbols: Tensor, position: Tensor, state: Any) -> Tensor:
        """Reads one symbol of each hypothesis and changes `state` accordingly, in place.

        Args:
            symbols: `[sentences, beam]`.
            position: how many were read before, `[]` int64, less than the state's capacity.
            state: as `begin` gave it.

        Returns:
            What `project` makes logits of, `[sentences, beam, width]`.
        """

    @abstractmethod
    def project(self, values: Tensor) -> Tensor:
        """Logits `[..., target_size]` of what `step` gave; in float32."""

    @abstractmethod
    def reorder(self, state: Any, parents: Tensor) -> None:
        """Lets hypothesis `b` go on from what was hypothesis `parents[sentence, b]` of its sentence; in place."""


def readable_places(source: Tensor) -> Tensor:
    """Where `source` `[sentences, s]` has symbols; the first place always counts as one."""
    return (source != PAD) | (torch.arange(source.size(1), device=source.device) == 0)


def project_unrounded(values: Tensor, generator: nn.Linear) -> Tensor:
    """What `generator` gives, in float32 where its weights are in half precision: a logit of 20 in bfloat16 would be off by up to 0.06."""
    if values.dtype not in (torch.bfloat16, torch.float16):
        projected: Tensor = generator(values)
        return projected
    flat, weight = values.reshape(-1, values.size(-1)), generator.weight.t()
    product = torch.mm(flat, weight, out_dtype=torch.float32) if values.is_cuda else flat.float() @ weight.float()
    product = product if generator.bias is None else product + generator.bias
    return product.view(*values.shape[:-1], -1)


def draw_embedding(embedding: nn.Embedding, generator: torch.Generator) -> None:
    """Normal with variance one over the width, PAD zero."""
    embedding.weight.normal_(0.0, embedding.embedding_dim**_EMBEDDING_POWER, generator=generator)
    if embedding.padding_idx is not None:
        embedding.weight[embedding.padding_idx].zero_()


def draw_matrix(weight: Tensor, generator: torch.Generator, *, parts: int = 1) -> None:
    """Uniform after Glorot and Bengio; of `parts` matrices that stand above each other each by itself."""
    for part in weight.chunk(parts):
        nn.init.xavier_uniform_(part, generator=generator)
