"""The one gradient synchroniser of a model, which all its optimizers share."""

from torch import nn

from hora.comm.dealt_out import require_whole
from hora.comm.session import session
from hora.errors import ConfigError
from hora.sync.settings import SyncSettings
from hora.sync.synchronizer import GradientSynchronizer
from hora.sync.trained import trainable_parameters


def synchronizer_of(model: nn.Module, settings: SyncSettings) -> GradientSynchronizer:
    """The synchroniser of `model`, made at the first call. Collective.

    Raises:
        ConfigError: the model has one with other settings, or parameters of which each rank has a part, or is wrapped in one that sums gradients too.
    """
    _require_unwrapped(model)
    require_whole(model.named_parameters(), "DistributedOptimizer and TrainStep sum the gradients of whole parameters")
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model and shares its parameters
    known = session().synchronizers
    existing = known.get(model)
    if isinstance(existing, GradientSynchronizer) and existing.trained.are_of(model):
        if existing.settings == settings:
            return existing
        if existing.serves_optimizers:  # else the one that it was made for was refused, and this is the next try
            raise ConfigError(
                f"all optimizers of one model must be made with the same settings, but this one has {settings} and an earlier one "
                f"{existing.settings}"
            )
    if isinstance(existing, GradientSynchronizer):
        existing.close()
    if not trainable_parameters(model):
        raise ConfigError("the model must have a trainable parameter, but none of its parameters has requires_grad=True")
    known[model] = made = GradientSynchronizer(model, settings)
    return made


def _require_unwrapped(model: nn.Module) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "the model must be unwrapped, but is a DistributedDataParallel, which sums the gradients too, before their weights are known: train and "
            "give model.module, or keep DistributedDataParallel and the plain optimizer"
        )
