"""What a model has to train: the parameters that get gradients, known by name, and that they stay those.

Relies on the hooks by which a module tells that it was given a parameter or a module. Knows nothing of windows or buckets.
"""

import weakref
from itertools import chain

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from hora.comm.session import session
from hora.errors import ConfigError
from hora.plan.buckets import ParameterFacts
from hora.sync.sparse import sparse_parameter_names


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, by name, tied ones once, in the order of registration."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class TrainedParameters:
    """The trainable parameters of `model`, which is refused once it has others.

    Attributes:
        named: by name, in the order of registration.
        facts: what all ranks must agree on, in the same order.

    Raises:
        ConfigError: forward changes a parameter, or the first one makes it.
    """

    def __init__(self, model: nn.Module):
        _require_made(model)
        _require_forward_keeps_weights(model)
        self.named = trainable_parameters(model)
        self.facts = _facts(model, self.named)
        self._kinds = [(name, parameter, parameter.dtype, parameter.device) for name, parameter in self.named.items()]
        self._model = weakref.ref(model)
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._registered = True  # looked at once more in the first window: fully_shard replaces parameters without telling anybody
        weak_self = weakref.ref(self)

        def on_registration(*_: object) -> None:
            trained = weak_self()
            if trained is not None:
                trained._registered = True

        self._handles = (
            register_module_parameter_registration_hook(on_registration),
            register_module_module_registration_hook(on_registration),
        )

    @property
    def names(self) -> dict[int, str]:
        """The names by the `id` of the parameters."""
        return {id(parameter): name for name, parameter in self.named.items()}

    def are_of(self, model: nn.Module) -> bool:
        """Whether these are exactly the trainable parameters that `model` has now."""
        now = trainable_parameters(model)
        return list(now) == list(self.named) and all(now[name] is self.named[name] for name in now)

    def require_same(self) -> None:
        """Refuses to go on with a model whose trainable parameters have changed.

        Walking a large model each step costs more than a small step takes, so it is walked only when some module got something.
        """
        for name, parameter, dtype, device in self._kinds:
            if parameter.dtype != dtype or parameter.device != device:
                raise ConfigError(
                    f"parameters must stay of the type and on the device that DistributedOptimizer was made for, but {name} was {dtype} on {device} "
                    f"and is {parameter.dtype} on {parameter.device}; convert or move the model first, and then make its optimizer"
                )
        flipped = not all(p.requires_grad for p in self.named.values()) or any(p.requires_grad for p in self._frozen)
        model = self._model()
        if model is None or not (flipped or self._registered):
            return
        self._registered = False
        if self.are_of(model):
            return
        now = trainable_parameters(model)
        changed = sorted(name for name in {*now, *self.named} if now.get(name) is not self.named.get(name))
        raise ConfigError(
            "the trainable parameters of a model must stay those that DistributedOptimizer was made for, but these were added, replaced, "
            f"frozen or unfrozen since: {', '.join(changed[:5])}{' ...' if len(changed) > 5 else ''}; make a new DistributedOptimizer (of "
            "optimizer.optimizer, to go on with its state)"
        )

    def require_shardable(self) -> None:
        """Refuses sparse gradients and complex numbers, for strategy "sharded"."""
        for name, parameter in self.named.items():
            if parameter.is_complex():
                raise ConfigError(f'strategy "sharded" takes real parameters, but {name} is complex; use strategy "overlap"')
        sparse = [fact.name for fact in self.facts if fact.sparse]
        if sparse:
            raise ConfigError(
                f'strategy "sharded" takes dense gradients, but {sparse[0]} is an embedding with sparse=True; use sparse=False, or strategy "overlap"'
            )

    def __str__(self) -> str:
        names = list(self.named)
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more parameters" if len(names) > 3 else "")

    def close(self) -> None:
        """Listens no more to what modules are given."""
        for handle in self._handles:
            handle.remove()


def _facts(model: nn.Module, named: dict[str, nn.Parameter]) -> list[ParameterFacts]:
    sparse = sparse_parameter_names(model)
    return [
        ParameterFacts(
            name=name,
            shape=tuple(parameter.shape),
            kind=f"{parameter.dtype} {parameter.device.type}",
            item_size_bytes=parameter.element_size(),
            sparse=name in sparse,
        )
        for name, parameter in named.items()
    ]


def _require_made(model: nn.Module) -> None:
    lazy = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"a model must have its parameters and buffers when it is handed over, but these are lazy and get their shape in the first forward: "
            f"{', '.join(lazy[:5])}{' ...' if len(lazy) > 5 else ''}; call the model on one batch before you make its optimizer"
        )


def _require_forward_keeps_weights(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None and session().logical_ranks.count > 1:
            raise ConfigError(
                f"forward must leave parameters alone, but {name or 'the model'} is an embedding with max_norm={module.max_norm}, which shortens "
                "the rows that a rank looks up, so that ranks drift apart; clip its weight after optimizer.step(), on all ranks alike"
            )
