"""`hvd.DistributedOptimizer`: the user's optimizer, whose gradients are combined over the ranks before each step.

What is returned is of a class made for it, a subclass of the optimizer's own, and shares its parameter groups and state.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from hora import pulse
from hora.errors import ConfigError
from hora.hvd import state
from hora.hvd.adasum_optimizer import AdasumSteps
from hora.hvd.asynchronous import Adasum, Average, Sum
from hora.hvd.buckets import plan_buckets
from hora.hvd.compression import Compression, Compressor
from hora.hvd.exceptions import brief
from hora.hvd.functions import require_optimizer
from hora.hvd.gradients import Combining, GradientExchange
from hora.hvd.process_sets import ProcessSet, global_process_set

_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can cause training slowdown. You "
    "may want to consider using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code."
)
_RACE = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). This is prohibited as it can "
    "cause a race condition."
)
_optimizers = itertools.count()


@dataclass(frozen=True)
class _Settings:
    """What `DistributedOptimizer` was told; a copy of the optimizer is made of it."""

    combining: Combining
    labels: tuple[str, ...]
    buckets: tuple[tuple[int, ...], ...]
    passes: int


@brief
def DistributedOptimizer(  # noqa: N802 (Horovod's)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes `optimizer` one whose gradients are combined over the ranks of `process_set` before each step.

    What it returns is an instance of the optimizer's class too, with `synchronize()` and `skip_synchronize()`. When a backward has brought all
    gradients, `.grad` is the combined one when it returns. A parameter without a gradient on a rank counts as zero there.

    Args:
        optimizer: any torch optimizer.
        named_parameters: names for its parameters, `model.named_parameters()`; all of them, if any.
        compression: what gradients travel as.
        backward_passes_per_step: how many passes add up before gradients travel; they are summed, so divide the loss.
        op: Average, Sum, or Adasum, which combines the updates of the ranks in place of their gradients.
        gradient_predivide_factor: gradients are divided by it before the sum, and the rest of the average is made after it.
        num_groups: the older word for a number of `groups`; deprecated.
        groups: how many groups of gradients travel, or the groups themselves; by default groups of 4 MiB.
        sparse_as_dense: have sparse gradients travel as dense ones; they are sparse again before they are used.
        process_set: who takes part; elsewhere the optimizer is what it was.

    Raises:
        ValueError: names are not unique, or not of all parameters; an argument is out of range or contradicts `op`.
        TypeError: `optimizer` is none.
    """
    require_optimizer(optimizer)
    if isinstance(optimizer, _Distributed):
        optimizer._detach()  # the gradients of its parameters are sent once
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    if op not in (Average, Sum, Adasum):
        raise ConfigError(f"op must be hvd.Average, hvd.Sum or hvd.Adasum, but is {op!r} instead")
    if backward_passes_per_step <= 0:
        raise ConfigError("backward_passes_per_step must be > 0")
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    parameters = _trained(optimizer)
    _check_groups(groups, optimizer)
    named = None if named_parameters is None else list(named_parameters)
    labels = _label(parameters, optimizer, named)
    order = range(len(parameters)) if named is None else _order_of_names(labels, named)
    combining = Combining(op, compression, 1.0 / gradient_predivide_factor, gradient_predivide_factor, sparse_as_dense, process_set)
    planned = plan_buckets([parameters[n] for n in order], groups)
    buckets = tuple(tuple(order[n] for n in bucket) for bucket in planned)
    settings = _Settings(combining, labels, buckets, backward_passes_per_step)
    made = _bare(_plain_class(optimizer), settings)
    made.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name not in ("step", *_OWN)})
    made._wrapped = optimizer
    made._attach()
    return made


class _Distributed(torch.optim.Optimizer):
    """What is put before the optimizer's own class."""

    _is_distributed: ClassVar[bool] = True
    _settings: _Settings
    _exchange: GradientExchange | None
    _wrapped: torch.optim.Optimizer | None
    _should_synchronize: bool
    _synchronized: bool
    _scaled: bool

    def synchronize(self) -> None:
        """Combines the gradients and waits for them. Collective: by the names of the parameters."""
        self._attach()
        if self._exchange is not None:
            self._exchange.finish()
        self._synchronized = True

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Inside the `with` block `step` combines nothing: `synchronize` has."""
        return self._skipping()

    @contextmanager
    def _skipping(self) -> Iterator[None]:
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combines the gradients, if that has not been done, and updates the parameters.

        Args:
            closure: computes the loss and its gradients, which are combined each time.
        """
        page = pulse.mine()
        page.begin_step()
        if closure is None:
            self._combine()
        result = super().step(closure if closure is None else self._combining(closure))
        self._synchronized = self._scaled = False
        if self._wrapped is not None:
            # A schedule made for the optimizer before it was wrapped asks that one whether there was a step.
            self._wrapped._opt_called = True  # type: ignore[attr-defined]
        page.end_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the optimizer's own step, and would wrap this one too

    def _combine(self) -> None:
        if not self._should_synchronize:
            return
        if self._synchronized and (self._exchange is None or not self._exchange.has_gradients):
            warnings.warn(_TWICE, stacklevel=3)
            return
        self.synchronize()

    def _combining(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def combined() -> Any:
            with torch.enable_grad():
                loss = closure()
            if self._should_synchronize:
                self.synchronize()
            return loss

        return combined

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients, as the optimizer's own.

        Raises:
            AssertionError: gradients have been sent, and no step has used them.
        """
        if self._exchange is not None and self._exchange.has_begun:
            if not self._scaled:
                raise AssertionError(_RACE)
            self._exchange.reset()
        self._scaled = self._synchronized = False
        super().zero_grad(*args, **kwargs)

    @property
    def backward_passes_per_step(self) -> int:
        """How many passes add up before gradients travel."""
        return self._settings.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A GradScaler asks this when it is to step, and may then leave the step out: what was sent counts as used."""
        self._scaled = True
        return False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many passes add up before gradients travel, from the next step on."""
        if passes <= 0:
            raise ConfigError("backward_passes_per_step must be > 0")
        self._settings = replace(self._settings, passes=passes)
        if self._exchange is not None:
            self._exchange.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, whose gradients are combined from now on. To be called by all ranks, between two steps."""
        super().add_param_group(param_group)
        settings, parameters = self._settings, _trained(self)
        begin = len(settings.labels)
        added = plan_buckets(parameters[begin:], None)
        self._settings = replace(
            settings,
            labels=(*settings.labels, *(f"added.{n}" for n in range(begin, len(parameters)))),
            buckets=(*settings.buckets, *(tuple(begin + n for n in bucket) for bucket in added)),
        )
        self._detach()
        self._attach()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the optimizer's state, and begins a step anew."""
        super().load_state_dict(state_dict)
        if self._exchange is not None:
            self._exchange.reset()
        self._synchronized = self._scaled = False
        if self._wrapped is not None:
            self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state

    def _attach(self) -> None:
        """Listens to the gradients, where there is somebody to combine them with."""
        combining = self._settings.combining
        if self._exchange is not None or not state.is_running():
            return
        if combining.process_set.size() > 1 and combining.process_set.included():
            settings = self._settings
            self._exchange = GradientExchange(_trained(self), settings.labels, settings.buckets, combining, settings.passes)

    def _detach(self) -> None:
        """Listens no more."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        base = type(self).__mro__[2]
        return _bare, (base, self._settings), self.__getstate__()

    def __setstate__(self, saved: dict[str, Any]) -> None:
        super().__setstate__(saved)
        self._attach()


class _DistributedAdasum(AdasumSteps, _Distributed):
    """The same for `op=Adasum`."""

    def _attach(self) -> None:
        """Nobody listens to the gradients: updates are combined."""


_OWN = ("_settings", "_exchange", "_wrapped", "_should_synchronize", "_synchronized", "_scaled")


@cache
def _class_for(base: type[torch.optim.Optimizer], shell: type[_Distributed]) -> type[_Distributed]:
    # Scripts look for "horovod" in the name of the class, to see whether an optimizer is distributed already (Lightning does).
    return type(base.__name__, (shell, base), {"__doc__": base.__doc__, "__module__": "horovod.torch.optimizer"})


def _plain_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that the user chose, also of one that is distributed already."""
    found = type(optimizer)
    plain: Any = next(base for base in found.__mro__ if not issubclass(base, _Distributed | AdasumSteps))
    return cast("type[torch.optim.Optimizer]", plain)


def _bare(base: type[torch.optim.Optimizer], settings: _Settings) -> Any:
    """An optimizer that has its settings and no parameters yet."""
    shell = _DistributedAdasum if settings.combining.op == Adasum else _Distributed
    find: Any = _class_for  # the stubs take an optimizer's class for one that cannot be hashed
    kind = find(base, shell)
    made = kind.__new__(kind)
    made._settings, made._exchange, made._wrapped = settings, None, None
    made._should_synchronize, made._synchronized, made._scaled = True, False, False
    return made


def _trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


def _label(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[str, Tensor]] | None
) -> tuple[str, ...]:
    if pairs is None:
        number = next(_optimizers)
        places = {
            id(parameter): f"noname.{number}.{g}.{n}"
            for g, group in enumerate(optimizer.param_groups)
            for n, parameter in enumerate(group["params"])
        }
        return tuple(places[id(parameter)] for parameter in parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ConfigError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}")
    known = {id(parameter): name for name, parameter in pairs}
    if unnamed := [id(p) for group in optimizer.param_groups for p in group["params"] if id(p) not in known]:
        raise ConfigError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(map(str, unnamed))}"
        )
    return tuple(known[id(parameter)] for parameter in parameters)


def _order_of_names(labels: Sequence[str], pairs: Sequence[tuple[str, Tensor]]) -> Sequence[int]:
    """The parameters as they stand in the model, which is the same on all ranks, where that of a parameter group may be that of a set."""
    places = {name: place for place, (name, _) in enumerate(pairs)}
    return sorted(range(len(labels)), key=lambda n: places[labels[n]])


def _check_groups(groups: Any, optimizer: torch.optim.Optimizer) -> None:
    if groups is None:
        return
    if isinstance(groups, list) and all(isinstance(group, list | tuple) for group in groups):
        known, seen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}, set()
        for tensor in itertools.chain(*groups):
            if id(tensor) not in known or id(tensor) in seen:
                raise ConfigError("groups must hold parameters of the optimizer, each once, but one is none of them, or comes twice")
            seen.add(id(tensor))
    elif not isinstance(groups, int) or groups < 0:
        raise ConfigError(f"groups should be a non-negative integer or a list of list of tensors, but is {groups!r} instead")
