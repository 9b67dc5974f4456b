"""Weights to begin with, from a file or a checkpoint of another run."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hora.errors import CheckpointMismatch, ConfigError
from hora.recipes.lm.model import LanguageModel
from hora.sync.parameters import broadcast_parameters
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.rank_zero import on_rank_zero


def load_weights(model: LanguageModel, path: Path, checkpointer: Checkpointer) -> None:
    """Gives `model` the weights at `path`: a safetensors file, or the directory of a checkpoint. Collective; only rank 0 reads.

    Raises:
        ConfigError: there is no such thing at `path`.
        CheckpointMismatch: the weights are those of another model.
    """
    if on_rank_zero(path.is_dir):
        fit(model, checkpointer.load(path).state["model"])
        return
    on_rank_zero(lambda: fit(model, _read_file(path)))
    broadcast_parameters(model)


def fit(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Loads a state_dict, also one of a model inside DistributedDataParallel (`module.` before each name).

    Raises:
        CheckpointMismatch: names or shapes do not fit; all are named.
    """
    found = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    wanted = model.state_dict()
    problems = [f"{name} is missing" for name in wanted.keys() - found.keys()] + [
        f"{name} is unknown" for name in found.keys() - wanted.keys()
    ]
    problems += [
        f"{name} must have shape {list(wanted[name].shape)}, but has {list(found[name].shape)}"
        for name in wanted.keys() & found.keys()
        if wanted[name].shape != found[name].shape
    ]
    if problems:
        raise CheckpointMismatch(f"the weights do not fit the model: {'; '.join(sorted(problems))}; give the configuration they come from")
    model.load_state_dict(found)


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} must be a safetensors file or the directory of a checkpoint, but: {error}; a file of torch.save is converted by "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW_FILE)"
        ) from error
