"""Weights from elsewhere: a plain file of named tensors, as saved from a model, from DistributedDataParallel or from a compiled one.

Safetensors files hold nothing but tensors and are read as they are. Files of `torch.save` are pickles: they are read only when asked for, and
only by PyTorch's restricted loader.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hora import log
from hora.comm.dealt_out import require_whole
from hora.errors import CheckpointMismatch, ConfigError
from hora.sync.parameters import broadcast_parameters
from hora.train.checkpoint.content import Content
from hora.train.checkpoint.inspection import newest
from hora.train.checkpoint.tensors import read_tensors
from hora.train.rank_zero import on_rank_zero

_SHOWN: Final = 10


def load_weights(path: Path, model: nn.Module, *, allow_torch_file: bool = False, partial: bool = False, averaged: bool = False) -> None:
    """Overwrites the parameters and buffers of `model` with those in a file, on every rank.

    The prefixes `module.` (DistributedDataParallel) and `_orig_mod.` (`torch.compile`) are taken off names that the model does not have. Types are
    converted to the model's.

    Collective: all ranks call it; rank 0 reads.

    Args:
        path: a `.safetensors` file, a checkpoint (its entry `model`), a run directory or one of checkpoints (the newest), or a file of `torch.save`
            that holds a state dict, alone or under `state_dict` or `model`.
        model: left as it was when an error is raised.
        allow_torch_file: whether a file of `torch.save` is read (with `weights_only=True`).
        averaged: of a checkpoint whose entry `average` has weights (`hora.train.averages`) take these, and of `model` the buffers.
        partial: take the weights whose name and shape the model has, and say which are left, instead of refusing them.

    Raises:
        CheckpointMismatch: none fits; or, unless `partial`, names or shapes in the file differ from the model's; all are named.
        CheckpointIncomplete: the checkpoint is damaged.
        ConfigError: the file cannot be read, or is one of `torch.save` and that was not allowed, or the model is dealt out already (`fully_shard`).
    """
    require_whole(model.named_parameters(), "load_weights fills whole parameters", "call it before fully_shard")
    on_rank_zero(lambda: _load(path, model, allow_torch_file, partial, averaged))
    broadcast_parameters(model)


def _load(path: Path, model: nn.Module, allow_torch_file: bool, partial: bool, averaged: bool) -> None:
    try:
        found = _read(path, model, allow_torch_file, averaged)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"the weights in {path} cannot be read: {error}") from error
    own = model.state_dict()
    tensors = _renamed(found, own)
    problems = differences(tensors, own)
    fitting = {name: tensor for name, tensor in tensors.items() if name in own and tensor.shape == own[name].shape}
    if problems and partial and fitting:
        log.get_logger().warning("%d weights of %s are taken, others do not fit: %s", len(fitting), path, "; ".join(problems))
        tensors = fitting
    elif problems:
        raise CheckpointMismatch(f"the weights in {path} do not fit the model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _read(path: Path, model: nn.Module, allow_torch_file: bool, averaged: bool) -> dict[str, Tensor]:
    if path.is_dir():
        # Not the optimizer's state, which is twice as large.
        entries = Content.read(newest(path), ("model", "average") if averaged else ("model",)).entries
        trees = {name: entry.tree() for name, entry in entries.items()}
        if trees.get("average", {}).get("num_updates"):
            buffers = {name: trees["model"][name] for name, _ in model.named_buffers() if name in trees["model"]}
            return _require_tensors(path, {**buffers, **trees["average"]["weights"]})
        return _require_tensors(path, trees.get("model"))
    return read_tensors(path) if path.suffix == ".safetensors" else _read_torch_file(path, allow_torch_file)


def _read_torch_file(path: Path, allowed: bool) -> dict[str, Tensor]:
    if not allowed:
        raise ConfigError(
            f"weights must be a .safetensors file, but {path} is not; a file of torch.save is a pickle: pass allow_torch_file=True "
            "(--allow-torch-file) to read it with PyTorch's restricted loader if you trust where it comes from, or save it anew with safetensors"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # A damaged or hostile file can make the loader raise anything; its own message advises to allow more.
        raise ConfigError(f"{path} is no file of torch.save that holds weights only ({type(error).__name__})") from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    return _require_tensors(path, content)


def _require_tensors(path: Path, content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"{path} must hold a state dict, but holds {type(content).__name__} instead")
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise ConfigError(f"{path} must hold named tensors, but {_listed(others)} are none")
    return {str(name): value for name, value in content.items()}


def _renamed(found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_own_name(name, own): tensor for name, tensor in found.items()}


def _own_name(name: str, own: Mapping[str, Tensor]) -> str:
    stripped = name
    while stripped not in own:
        shorter = stripped.replace("_orig_mod.", "").removeprefix("module.")
        if shorter == stripped:
            return name
        stripped = shorter
    return stripped


def differences(found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """What keeps `found` from being the model's own, as phrases; a name that is tied to one in the file is not missing."""
    given = {own[name].data_ptr() for name in found if name in own}
    missing = [name for name, tensor in own.items() if name not in found and (tensor.data_ptr() not in given or not tensor.numel())]
    unexpected = [name for name in found if name not in own]
    shapes = [
        f"{name} must be {list(own[name].shape)}, but is {list(tensor.shape)} instead"
        for name, tensor in found.items()
        if name in own and tensor.shape != own[name].shape
    ]
    phrases = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    return [f"{what}: {_listed(names)}" for what, names in phrases if names]


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
