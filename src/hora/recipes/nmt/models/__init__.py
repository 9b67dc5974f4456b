"""The networks that translate: the Transformer and the attentional GRU of DL4MT, behind one interface (`base`)."""

import torch

from hora.errors import ConfigError
from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.models.base import TranslationModel
from hora.recipes.nmt.models.dl4mt import Dl4mt
from hora.recipes.nmt.models.transformer import Transformer

__all__ = ["TranslationModel", "build_model"]


def build_model(config: ModelConfig, source_size: int, target_size: int, *, seed: int) -> TranslationModel:
    """Makes the model that `config` describes, on the CPU in float32, with weights drawn from `seed`: the same on every rank.

    Args:
        config: section `model_configs`.
        source_size: symbols of the source's vocabulary.
        target_size: symbols of the target's.
        seed: for a generator of the model's own, so that it does not matter what was drawn before.

    Raises:
        ConfigError: source and target shall have one embedding, but their vocabularies differ in size.
    """
    if config.model == "Transformer" and config.tie_source_target_embedding and source_size != target_size:
        raise ConfigError(
            f"tie_source_target_embedding wants one vocabulary for both sides, but the source has {source_size} symbols and the target "
            f"{target_size}; give both the same vocabulary, or set it to false"
        )
    kinds: dict[str, type[Transformer] | type[Dl4mt]] = {"Transformer": Transformer, "DL4MT": Dl4mt}
    model = kinds[config.model](config, source_size, target_size)
    model.initialize(torch.Generator().manual_seed(seed))
    return model
