"""The two networks of the recipe: Zaremba's LSTM and a small Transformer, behind one interface.

Weights are drawn in a fixed order from a generator of their own, so that the same seed gives the same model whatever ran before. Knows
nothing of ranks.
"""

import math
from abc import ABC, abstractmethod
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hora.recipes.lm.config import ModelConfig

State = tuple[Tensor, ...]
"""What a model carries from one window to the next: tensors `[layers, rows, hidden]`; none for a model without memory."""

NO_TARGET: Final = -100
"""Target at a place where nothing is to be predicted; it costs nothing and does not count."""


class LanguageModel(nn.Module, ABC):
    """Predicts the next word at every place of a window."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @abstractmethod
    def initialize(self, generator: torch.Generator) -> None:
        """Draws every weight anew from `generator` (of the CPU), in the order of the parameters."""

    @abstractmethod
    def initial_state(self, rows: int) -> State:
        """The state before the first window of `rows` rows, on the model's device."""

    @abstractmethod
    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Reads a window.

        Args:
            inputs: words `[rows, time]`.
            state: where the rows stand, as `initial_state` or the call before gave it.

        Returns:
            Scores of the next word `[rows, time, vocabulary]` and the state after the window, still attached to the graph.
        """


def build_model(config: ModelConfig, *, vocabulary_size: int, window: int, seed: int) -> LanguageModel:
    """Makes the model that `config` describes, on the CPU in float32, with weights drawn from `seed`."""
    model: LanguageModel
    if config.kind == "lstm":
        model = LstmModel(config, vocabulary_size)
    else:
        model = TransformerModel(config, vocabulary_size, window)
    model.initialize(torch.Generator().manual_seed(seed))
    return model


def nll_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of `targets` `[rows, time]` under `logits` `[rows, time, vocabulary]`, summed over rows and time."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")


class LstmModel(LanguageModel):
    """Stacked LSTM (Zaremba, Sutskever and Vinyals, arXiv:1409.2329).

    Dropout falls on the embedded input and on each layer's output, never on what a layer passes to itself. All weights, embeddings and biases
    begin uniform. A gate has one bias, as in the original: PyTorch's second one stays zero and is not trained. Nothing is added to the forget
    gate.
    """

    def __init__(self, config: ModelConfig, vocabulary_size: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.init_scale = config.init_scale
        self.embedding = nn.Embedding(vocabulary_size, size)
        # Layers of their own with nn.Dropout between them: cuDNN's own dropout keeps a hidden random state that no seed brings back.
        self.layers = nn.ModuleList(nn.LSTM(size, size) for _ in range(config.num_layers))
        self.dropout = nn.Dropout(1 - config.keep_prob)
        self.output = nn.Linear(size, vocabulary_size)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """See `LanguageModel`."""
        for name, parameter in self.named_parameters():
            if "bias_hh" in name:
                parameter.zero_().requires_grad_(False)
            else:
                parameter.uniform_(-self.init_scale, self.init_scale, generator=generator)

    def initial_state(self, rows: int) -> State:
        """See `LanguageModel`."""
        shape = len(self.layers), rows, self.embedding.embedding_dim
        return self.embedding.weight.new_zeros(shape), self.embedding.weight.new_zeros(shape)

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """See `LanguageModel`."""
        hidden, cell = state
        # Time first is what cuDNN wants; turning the word numbers costs less than turning vectors.
        values = self.dropout(self.embedding(inputs.t()))
        after: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self.layers):
            values, last = layer(values, (hidden[index : index + 1], cell[index : index + 1]))
            values = self.dropout(values)
            after.append(last)
        hidden, cell = (torch.cat(tensors) for tensors in zip(*after, strict=True))
        return self.output(values.transpose(0, 1)), (hidden, cell)


class TransformerModel(LanguageModel):
    """Small Transformer: normalisation before each block, causal attention, learned places, one matrix for input and output.

    It has no memory beyond its window.
    """

    def __init__(self, config: ModelConfig, vocabulary_size: int, window: int) -> None:
        super().__init__()
        self.init_scale = config.init_scale
        self.embedding = nn.Embedding(vocabulary_size, config.hidden_size)
        self.places = nn.Embedding(window, config.hidden_size)
        self.dropout = nn.Dropout(1 - config.keep_prob)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """See `LanguageModel`."""
        # What is added to the residual stream is drawn smaller, so that its variance does not grow with the depth (GPT-2).
        residual_scale = self.init_scale / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                scale = residual_scale if name.endswith("to_residual.weight") else self.init_scale
                parameter.normal_(0.0, scale, generator=generator)

    def initial_state(self, rows: int) -> State:
        """See `LanguageModel`."""
        del rows
        return ()

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """See `LanguageModel`."""
        places = torch.arange(inputs.size(1), device=inputs.device)
        values = self.dropout(self.embedding(inputs) + self.places(places))
        for block in self.blocks:
            values = block(values)
        return F.linear(self.norm(values), self.embedding.weight), state


class _Block(nn.Module):
    """Attention, then a network of each place alone; both add to the stream what dropout leaves of their output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.dropout = nn.Dropout(1 - config.keep_prob)
        self.attention_norm = nn.LayerNorm(size)
        self.attention = _CausalAttention(size, config.num_heads)
        self.network_norm = nn.LayerNorm(size)
        self.network = _Network(size)

    def forward(self, values: Tensor) -> Tensor:
        values = values + self.dropout(self.attention(self.attention_norm(values)))
        added: Tensor = self.dropout(self.network(self.network_norm(values)))
        return values + added


class _CausalAttention(nn.Module):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_heads = nn.Linear(size, 3 * size)
        self.to_residual = nn.Linear(size, size)

    def forward(self, values: Tensor) -> Tensor:
        rows, time, size = values.shape
        heads = self.to_heads(values).view(rows, time, 3, self.num_heads, size // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        added: Tensor = self.to_residual(mixed.transpose(1, 2).reshape(rows, time, size))
        return added


class _Network(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.widen = nn.Linear(size, 4 * size)
        self.to_residual = nn.Linear(4 * size, size)

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.to_residual(F.gelu(self.widen(values)))
        return added
