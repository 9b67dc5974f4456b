"""What a translation run is made of: one tree of dataclasses in the four sections of NJUNMT-pytorch, whose files are read as they stand.

Imports no torch, so that a wrong value is told before a rank is started.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hora.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    `label_smoothing` is that of the training loss. `d_word_vec` is the width of embeddings; the Transformer's must be `d_model`. `dim_per_head` None
    means `d_model // n_head`. `tie_input_output_embedding`: the decoder's embedding is its output matrix too; `tie_source_target_embedding`: and
    the encoder's embedding, for which the vocabularies must be one. `layer_norm_first` normalises what goes into a layer, not what comes out.
    `bridge_type` is the DL4MT's alone: how its decoder begins, `mlp` from the encoder's states, `zero` from nothing.
    """

    model: Literal["Transformer", "DL4MT"] = "Transformer"
    label_smoothing: Share = 0.0
    n_layers: Count = 6
    n_head: Count = 8
    d_word_vec: Count = 512
    d_model: Count = 512
    d_inner_hid: Count = 1024
    dim_per_head: Count | None = None
    dropout: Share = 0.1
    tie_input_output_embedding: bool = True
    tie_source_target_embedding: bool = False
    layer_norm_first: bool = True
    positional_embedding: Literal["sin", "learned", "none"] = "sin"
    ffn_activation: Literal["relu", "gelu"] = "relu"
    generator_bias: bool = False
    bridge_type: Literal["mlp", "zero"] = "mlp"

    def __post_init__(self) -> None:
        if self.model != "Transformer":
            return
        if self.d_model != self.d_word_vec:
            raise ConfigError(f"a Transformer's d_word_vec must be its d_model, but they are {self.d_word_vec} and {self.d_model}")
        if self.dim_per_head is None and self.d_model % self.n_head:
            raise ConfigError(f"d_model = {self.d_model} must be a multiple of n_head = {self.n_head}, or dim_per_head be given")
