"""The Transformer (Vaswani et al., arXiv:1706.03762), with normalisation before or after each part.

Matrices begin uniform after Glorot and Bengio (query, key and value each by itself), biases zero, embeddings normal with variance `1 / d_model` and
multiplied by `sqrt(d_model)` when they are read, learned places normal with the same variance. Dropout falls on embedded symbols, on what each part
adds, inside the perceptron and on attention weights.
"""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hora.errors import ConfigError
from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.models.attention import Cache, SelfAttention, SourceAttention
from hora.recipes.nmt.models.base import (
    Memory,
    TranslationModel,
    draw_embedding,
    draw_matrix,
    project_unrounded,
    readable_places,
)
from hora.recipes.nmt.symbols import PAD

MAX_LEARNED_PLACES: Final = 1024
"""Longest sequence with learned places."""


class TransformerState(NamedTuple):
    """Where the hypotheses stand.

    Attributes:
        keys: of self-attention, `[layers, sentences, heads, capacity, beam, head_width]`; what stands at a place, any hypothesis may have written.
        values: likewise.
        own: which of these are a hypothesis' own past, `[sentences, beam (whose), capacity, beam]`, bool.
        source_keys: `[layers, sentences, heads, s, head_width]`.
        source_values: likewise.
        readable: `[sentences, 1, 1, s]`, bool.
    """

    keys: Tensor
    values: Tensor
    own: Tensor
    source_keys: Tensor
    source_values: Tensor
    readable: Tensor


class Transformer(TranslationModel):
    """Encoder and decoder."""

    def __init__(self, config: ModelConfig, source_size: int, target_size: int) -> None:
        super().__init__(config, source_size, target_size)
        width = config.d_model
        self.source = Embedding(config, nn.Embedding(source_size, width, padding_idx=PAD))
        tied = self.source.symbols if config.tie_source_target_embedding else nn.Embedding(target_size, width, padding_idx=PAD)
        self.target = Embedding(config, tied)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers))
        self.norm_encoded = nn.LayerNorm(width) if config.layer_norm_first else nn.Identity()
        self.norm_decoded = nn.LayerNorm(width) if config.layer_norm_first else nn.Identity()
        self.generator = nn.Linear(width, target_size, bias=config.generator_bias)
        if config.tie_input_output_embedding:
            self.generator.weight = self.target.symbols.weight

    @property
    def most_places(self) -> float:
        """See `TranslationModel`."""
        return math.inf if self.source.places is None else MAX_LEARNED_PLACES

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """See `TranslationModel`."""
        draw_matrix(self.generator.weight, generator)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                draw_embedding(module, generator)
            elif isinstance(module, SelfAttention | SourceAttention | Perceptron):
                module.initialize(generator)

    def encode(self, source: Tensor) -> Memory:
        """See `TranslationModel`."""
        readable = readable_places(source)
        values = self.source(source, torch.arange(source.size(1), device=source.device))
        for layer in self.encoder:
            values = layer(values, readable[:, None, None, :])
        return Memory(self.norm_encoded(values), readable)

    def decode(self, memory: Memory, target_in: Tensor) -> Tensor:
        """See `TranslationModel`."""
        readable = memory.readable[:, None, None, :]
        values = self.target(target_in, torch.arange(target_in.size(1), device=target_in.device))
        for layer in self.decoder:
            values = layer(values, memory.values, readable)
        logits: Tensor = self.generator(self.norm_decoded(values))
        return logits

    @property
    def _decoder_layers(self) -> "Iterable[DecoderLayer]":
        return cast("Iterable[DecoderLayer]", self.decoder)

    def begin(self, memory: Memory, beam_size: int, capacity: int) -> TransformerState:
        """See `TranslationModel`."""
        sentences, _, _ = memory.values.shape
        read = [layer.source.read(memory.values) for layer in self._decoder_layers]
        source_keys, source_values = (torch.stack(tensors) for tensors in zip(*read, strict=True))
        layers, _, heads, _, head_width = source_keys.shape
        cache = source_keys.new_zeros(layers, sentences, heads, capacity, beam_size, head_width)
        own = torch.zeros(sentences, beam_size, capacity, beam_size, dtype=torch.bool, device=cache.device)
        return TransformerState(cache, cache.clone(), own, source_keys, source_values, memory.readable[:, None, None, :])

    def step(self, symbols: Tensor, position: Tensor, state: TransformerState) -> Tensor:
        """See `TranslationModel`."""
        beam_size = symbols.size(1)
        own_place = torch.eye(beam_size, dtype=torch.bool, device=symbols.device).expand(symbols.size(0), -1, -1)
        state.own.index_copy_(2, position[None], own_place[:, :, None])
        values = self.target(symbols, position[None])
        # Made once for all layers; of a mask that is bool each call would make another one.
        mask = _as_summand(state.own, values.dtype).flatten(2)[:, None]
        readable = _as_summand(state.readable, values.dtype)
        places = position * beam_size + torch.arange(beam_size, device=symbols.device)
        for index, layer in enumerate(self._decoder_layers):
            cache = Cache(state.keys[index].flatten(2, 3), state.values[index].flatten(2, 3), places, mask)
            values = layer.step(values, cache, state.source_keys[index], state.source_values[index], readable)
        normed: Tensor = self.norm_decoded(values)
        return normed

    def project(self, values: Tensor) -> Tensor:
        """See `TranslationModel`."""
        return project_unrounded(values, self.generator)

    def reorder(self, state: TransformerState, parents: Tensor) -> None:
        """See `TranslationModel`."""
        state.own.copy_(state.own.gather(1, parents[:, :, None, None].expand_as(state.own)))


class Embedding(nn.Module):
    """Symbols and their places as vectors."""

    def __init__(self, config: ModelConfig, symbols: nn.Embedding) -> None:
        super().__init__()
        self.kind = config.positional_embedding
        self.symbols = symbols
        self.places = nn.Embedding(MAX_LEARNED_PLACES, config.d_model) if self.kind == "learned" else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, symbols: Tensor, places: Tensor) -> Tensor:
        """`[sentences, time]` at `places` `[time or 1]` to `[sentences, time, d_model]`."""
        width = self.symbols.embedding_dim
        values = self.symbols(symbols) * math.sqrt(width)
        if self.places is not None:
            if places.numel() > MAX_LEARNED_PLACES:
                raise ConfigError(f"learned places go up to {MAX_LEARNED_PLACES} symbols, but a sequence has {places.numel()}")
            values = values + self.places(places)
        elif self.kind == "sin":
            values = values + sinusoids(places, width).to(values.dtype)
        embedded: Tensor = self.dropout(values)
        return embedded


class EncoderLayer(nn.Module):
    """Attention to the whole source, and a perceptron."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.own = SelfAttention(*_heads(config))
        self.perceptron = Perceptron(config)
        self.own_frame, self.perceptron_frame = Frame(config), Frame(config)

    def forward(self, values: Tensor, readable: Tensor) -> Tensor:
        """`[sentences, s, d_model]` to as many."""
        frame = self.own_frame
        values = frame.close(values, self.own(frame.open(values), readable))
        frame = self.perceptron_frame
        return frame.close(values, self.perceptron(frame.open(values)))


class DecoderLayer(nn.Module):
    """Attention to the symbols before, attention to the source, and a perceptron."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.own = SelfAttention(*_heads(config))
        self.source = SourceAttention(*_heads(config))
        self.perceptron = Perceptron(config)
        self.own_frame, self.source_frame, self.perceptron_frame = Frame(config), Frame(config), Frame(config)

    def forward(self, values: Tensor, memory: Tensor, readable: Tensor) -> Tensor:
        """`[sentences, t, d_model]` to as many."""
        frame = self.own_frame
        values = frame.close(values, self.own(frame.open(values), None))
        return self._rest(values, *self.source.read(memory), readable)

    def step(self, values: Tensor, cache: Cache, source_keys: Tensor, source_values: Tensor, readable: Tensor) -> Tensor:
        """One symbol of each hypothesis, `[sentences, beam, d_model]` to as many."""
        frame = self.own_frame
        values = frame.close(values, self.own.step(frame.open(values), cache))
        return self._rest(values, source_keys, source_values, readable)

    def _rest(self, values: Tensor, source_keys: Tensor, source_values: Tensor, readable: Tensor) -> Tensor:
        frame = self.source_frame
        values = frame.close(values, self.source(frame.open(values), source_keys, source_values, readable))
        frame = self.perceptron_frame
        return frame.close(values, self.perceptron(frame.open(values)))


class Frame(nn.Module):
    """What stands around a part: the sum with what went in, and normalisation before the part or after the sum."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.norm_first = config.layer_norm_first
        self.dropout = nn.Dropout(config.dropout)

    def open(self, values: Tensor) -> Tensor:
        """What the part is given."""
        opened: Tensor = self.norm(values) if self.norm_first else values
        return opened

    def close(self, values: Tensor, added: Tensor) -> Tensor:
        """What stands after the part, which gave `added`."""
        total = values + self.dropout(added)
        closed: Tensor = total if self.norm_first else self.norm(total)
        return closed


class Perceptron(nn.Module):
    """A network of each place alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = F.gelu if config.ffn_activation == "gelu" else F.relu
        self.widen = nn.Linear(config.d_model, config.d_inner_hid)
        self.dropout = nn.Dropout(config.dropout if config.activation_dropout is None else config.activation_dropout)
        self.to_residual = nn.Linear(config.d_inner_hid, config.d_model)

    def initialize(self, generator: torch.Generator) -> None:
        """Draws the matrices."""
        draw_matrix(self.widen.weight, generator)
        draw_matrix(self.to_residual.weight, generator)

    def forward(self, values: Tensor) -> Tensor:
        """`[..., d_model]` to as many."""
        added: Tensor = self.to_residual(self.dropout(self.activation(self.widen(values))))
        return added


def sinusoids(places: Tensor, width: int) -> Tensor:
    """Sines of each place at falling rates and then the cosines, `[places, width]`, in float32."""
    rates = torch.exp(torch.arange((width + 1) // 2, device=places.device) * (-2 * math.log(10_000.0) / width))
    angles = places[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]


def _as_summand(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores so that only `allowed` ones count."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -math.inf)


def _heads(config: ModelConfig) -> tuple[int, int, int, float]:
    dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
    return config.d_model, config.n_head, config.dim_per_head or config.d_model // config.n_head, dropout
