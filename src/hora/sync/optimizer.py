"""DistributedOptimizer: a torch optimizer whose gradients are those of the global batch, whatever the number of ranks.

A thin shell: parameter groups, state and defaults are the wrapped optimizer's own; the work is the synchroniser's. The model stays unwrapped.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsFloat, TypeVar

import torch
from torch import Tensor, nn

from hora import events
from hora.comm.session import session
from hora.comm.torch_private import has_step_hooks
from hora.errors import ConfigError
from hora.sync.agreement import require_same_optimizer
from hora.sync.buffers import sync_buffers
from hora.sync.captured import CapturedChecks
from hora.sync.checks import Checks
from hora.sync.finite import FiniteGradients
from hora.sync.fused import divides_the_same, is_same_in_parts, prefer_fused, switched_off_if
from hora.sync.gradients import GradientBucket
from hora.sync.parameters import broadcast_optimizer_state
from hora.sync.replicas import compare_replicas
from hora.sync.settings import SyncSettings
from hora.sync.sharded import ShardedUpdate, take_state_back
from hora.sync.sharing import synchronizer_of
from hora.sync.synchronizer import GradientSynchronizer
from hora.sync.trained import trainable_parameters

T = TypeVar("T")


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer` so that each update is the one that a single process would make of the global batch.

    Collective: all ranks make it, with the same model and arguments. Everybody then has rank 0's parameters, buffers and optimizer state.

    When the last `backward` of a step has returned, `.grad` of every parameter of `model` is the sum of the losses' gradients over all ranks
    and micro-batches, divided by the total weight: the same on every rank. Gradient clipping, `GradScaler` and schedules stand as they are.

    A loop that keeps `loss.backward(); optimizer.step()` averages over the ranks: every `accumulation_steps`-th backward is a last one, the
    passes before it add up.

    Args:
        optimizer: any torch optimizer without a closure; its parameters must belong to `model`. Several optimizers may share a model. SGD, Adam and
            AdamW on a GPU that were asked for no implementation (`fused`, `foreach`) are fused from here on.
        model: the module whose gradients are synchronised.
        strategy: "overlap" sends gradients during the last backward, "deferred" after it. "sharded" as "overlap", and each rank keeps the state
            of its share of the parameters and updates that alone; `.grad` is None then, and `state_dict` is a collective.
        bucket_cap_bytes: how many bytes of gradients travel together; by default 25 MiB, on GPUs a third of them all, from 25 to 100 MiB.
        accumulation_steps: for loops without `micro_batches`: backward passes of one step.
        clip_norm: if given, `step()` scales the gradients of this optimizer's parameters to this total 2-norm at most.
        checks: what is looked at while training, and what happens then; by default all of it.
        wire_dtype: torch.bfloat16 or torch.float16: so travel gradients of float32 and float64, with half the bytes or less; they are added up in
            their own type. Sums of losses have large gradients, for which float16 wants a loss scale.

    Raises:
        ConfigError: a parameter of `optimizer` is not a trainable parameter of `model`; an argument is out of range; what cannot be trained so.
        CollectiveMismatch: the ranks' models differ; names the first parameter and the ranks.
    """

    # A fused optimizer reads the scale that GradScaler puts on the object it is handed, which is this shell: let the scaler unscale first.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        strategy: str = "overlap",
        bucket_cap_bytes: int | None = None,
        accumulation_steps: int = 1,
        clip_norm: float | None = None,
        checks: Checks | None = None,
        wire_dtype: torch.dtype | None = None,
    ):
        _require_plain_optimizer(optimizer)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be the module whose parameters are trained, but is a {type(model).__name__} instead")
        if checks is not None and not isinstance(checks, Checks):
            raise ConfigError(f"checks must be a hora.Checks, but is a {type(checks).__name__} instead")
        self.optimizer = optimizer
        self.last_grad_norm: Tensor | None = None
        self._updates = 0
        _require_members(optimizer.param_groups, model)
        self._model = model
        self._synchronizer = synchronizer_of(
            model, SyncSettings(strategy, bucket_cap_bytes, accumulation_steps, checks or Checks(), wire_dtype)
        )
        self._completed = self._synchronizer.completed
        self.clip_norm = clip_norm
        require_same_optimizer(optimizer, self._synchronizer.trained.names, clip_norm)
        if not self._synchronizer.has_sparse_gradients:
            prefer_fused(optimizer)
        take_state_back(optimizer)
        broadcast_optimizer_state(optimizer)
        self._sharded: ShardedUpdate | None = None
        if (buckets := self._synchronizer.sharded) is not None:
            if self._synchronizer.settings.checks.repair:
                raise ConfigError(
                    'Checks(repair=True) gives a rank the state of another one, but under strategy "sharded" nobody else has it'
                )
            self._sharded = ShardedUpdate(optimizer, buckets)
            self._synchronizer.applied_to_shards = self._sharded.inner
        self._synchronizer.serves_optimizers = True

    @property
    def clip_norm(self) -> float | None:
        """To what 2-norm `step()` scales the gradients at most; may be set, on all ranks alike."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, clip_norm: float | None) -> None:
        if clip_norm is not None and not (isinstance(clip_norm, SupportsFloat) and float(clip_norm) > 0):
            raise ConfigError(f"clip_norm must be greater than 0 or None, but is {clip_norm!r} instead")
        if clip_norm is not None and (sparse := self._synchronizer.sparse_among(self._parameters())):
            raise ConfigError(
                f"clip_norm takes dense gradients, but {sparse[0]} is an embedding with sparse=True; use sparse=False, or give it an optimizer of "
                "its own without clip_norm"
            )
        self._clip_norm = clip_norm

    @property
    def applied(self) -> torch.optim.Optimizer:
        """The optimizer that makes the updates: the wrapped one, or under strategy "sharded" one like it, of this rank's share."""
        return self.optimizer if self._sharded is None else self._sharded.inner

    def micro_batches(self, step: Iterable[T]) -> Iterator[T]:
        """Yields the micro-batches of one step, from any iterable; the gradients are cleared first.

        Collective: all ranks loop, each to its end; a rank with an empty `step` takes part with weight 0.
        """
        return self._synchronizer.micro_batches(step)

    def backward(self, loss_sum: Tensor | Sequence[Tensor], *, weight: float | Tensor) -> None:
        """Adds one micro-batch to the step.

        Collective: the last one of a step on each rank. Outside `micro_batches` every `accumulation_steps`-th is the last.

        Args:
            loss_sum: the losses of the micro-batch's samples (or tokens), summed, as a scalar; several scalars are added up.
            weight: how many samples (or tokens) these are: the update divides by the weights of all ranks and micro-batches together.

        Raises:
            ConfigError: a second backward in one micro-batch, or after the last of a step; a negative weight.
            CollectiveError: a rank did not take part.
        """
        self._synchronizer.backward(loss_sum if isinstance(loss_sum, Sequence) else [loss_sum], weight)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clips (with `clip_norm`) and applies the gradients of the global batch.

        Raises:
            ConfigError: `closure` is given, or no last backward has completed since the last step.
            NonFiniteGradient: the gradient is not finite (`checks`), and no rank has applied it; on every rank alike. Of a fused optimizer on
                a GPU: by the next step().
            ReplicaMismatch: the ranks' parameters are not the same (`checks`); on every rank alike.
        """
        if closure is not None:
            raise ConfigError(
                "step() takes no closure: call backward first, then step() by itself; an optimizer that evaluates the loss several times a step "
                "(LBFGS) is not supported"
            )
        self._synchronizer.before_update(self._completed)
        self._completed = self._synchronizer.completed
        rank, step = session().rank, self._completed - 1
        events.fault_point(f"step.{step}.before", rank=rank)
        finite = self._synchronizer.finite
        assert isinstance(finite, FiniteGradients)
        with finite.update(self.applied, on_device=self._synchronizer.switches_off_on_device(self.applied)) as wanted:
            if wanted:
                self.clip_and_update()
                events.observer().on_step(step=step, values={})
        self.count_update()
        events.observer().on_mark(events.Mark.UPDATE_END)
        events.fault_point(f"step.{step}.after", rank=rank)

    @property
    def synchronizer(self) -> GradientSynchronizer:
        """What makes the gradients, for `TrainStep`."""
        return self._synchronizer

    def serves(self, model: nn.Module) -> bool:
        """Whether this is an optimizer of `model`."""
        return getattr(model, "_orig_mod", model) is getattr(self._model, "_orig_mod", self._model)

    def count_update(self) -> None:
        """Notes that an update was made, and compares the replicas when it is time to. Collective."""
        self._completed = self._synchronizer.completed
        self._updates += 1
        every = self._synchronizer.settings.checks.check_every
        if every and self._updates % every == 0:
            self.compare_replicas()

    def clip_and_update(self) -> None:
        """Clips and applies the gradients as they are; `step()` is what a loop calls."""
        if self._sharded is not None:
            if (norm := self._sharded.clip(self.clip_norm)) is not None:
                self.last_grad_norm = norm
            self._sharded.update()
            return
        if self.clip_norm is not None:
            self.last_grad_norm = nn.utils.clip_grad_norm_(self._parameters(), self.clip_norm)
        self.optimizer.step()

    def update_captured(self, checks: CapturedChecks) -> None:
        """The update of a window that has just been captured, while its sums arrive."""
        arrivals = self._synchronizer.arrivals()
        # Gradients of other types are rounded when they are divided, which an optimizer that divides them leaves out.
        folds = divides_the_same(self.applied) and all(parameter.dtype == torch.float32 for parameter in self._parameters())
        if self.clip_norm is not None or has_step_hooks(self.optimizer) or not is_same_in_parts(self.applied):
            for bucket in arrivals.divided():
                bucket.unpack()
            with switched_off_if(self.applied, checks.flag):
                self.clip_and_update()
        elif folds:
            self._update_one_by_one(arrivals.undivided(), checks.flag, None if arrivals.are_divided else arrivals.divisor.float())
        else:
            self._update_one_by_one(arrivals.divided(), checks.flag, None)
        checks.join()

    def _update_one_by_one(self, arrivals: Iterable[GradientBucket], flag: Tensor | None, divisor: Tensor | None) -> None:
        """Updates the parameters of a bucket while the sums of others are on their way: the others have no gradient meanwhile."""
        buckets: list[GradientBucket] = []
        self.optimizer.zero_grad()
        self.applied.zero_grad()
        if self._sharded is not None:
            self._sharded.begin()
        for bucket in arrivals:
            bucket.unpack()
            with switched_off_if(self.applied, flag, divisor):
                if self._sharded is None:
                    self.optimizer.step()
                else:
                    self._sharded.step([bucket])
            bucket.put_aside()
            buckets.append(bucket)
        for bucket in buckets:
            bucket.unpack()
        if self._sharded is not None:
            self._sharded.end()

    @property
    def skipped_steps(self) -> int:
        """Updates that were left out because their gradient was not finite, as far as the host knows."""
        return self._synchronizer.finite.num_skipped

    def settle_checks(self) -> None:
        """Reports now what the next step() would: an update that a GPU has left out. Waits for the device.

        Collective: to be called where the host looks at results anyway (a log line, a checkpoint, the end), so that they do not speak first.

        Raises:
            NonFiniteGradient: as `step`.
        """
        self._synchronizer.finite.settle()

    def compare_replicas(self) -> None:
        """Makes sure that all ranks have the same parameters, as is done by itself every `check_every` updates. Collective.

        Raises:
            ReplicaMismatch: they have not, and are not to be or cannot be repaired (`checks`); names the ranks and the first parameter.
        """
        compare_replicas(
            dict(self._model.named_parameters()),
            f"update {self._updates}",
            self.optimizer if self._synchronizer.settings.checks.repair else None,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this optimizer's parameters. `micro_batches` does so by itself."""
        self.optimizer.zero_grad(set_to_none)
        self._synchronizer.reset()

    def request_stop(self) -> None:
        """Asks all ranks to stop; they see it in `stop_agreed` together (on a CPU after this step's backward, on a GPU one step later)."""
        self._synchronizer.stop_requested = True

    @property
    def stop_agreed(self) -> bool:
        """Whether a rank has asked to stop: the same on every rank at the same step."""
        return self._synchronizer.stop_agreed

    def sync_buffers(self) -> None:
        """Makes the model's buffers equal on all ranks, running statistics weighed by each rank's samples. Collective."""
        sync_buffers(self._model, self._synchronizer.local_weight)
        self._synchronizer.local_weight = 0.0

    # The wrapped optimizer's own --------------------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state; under strategy "sharded" that of this rank's slices."""
        return self.applied.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer; its parameters must belong to the model."""
        if self._sharded is not None:
            raise ConfigError('strategy "sharded" deals the parameters out when it begins: give the optimizer all groups before')
        parameters = param_group["params"]
        if not isinstance(parameters, Tensor | set):  # an iterator can be gone through once; of sets torch says that they have no order
            parameters = list(parameters)
        members = [parameters] if isinstance(parameters, Tensor) else [p[1] if isinstance(p, tuple) else p for p in parameters]
        _require_members([{"params": members}], self._model)
        self.optimizer.add_param_group({**param_group, "params": parameters})

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict, whatever the strategy. Collective under strategy "sharded", of whose state every rank gets all."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state_dict, from whatever strategy and number of ranks."""
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: __init__ failed early
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def _require_plain_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, DistributedOptimizer):
        raise ConfigError("optimizer must be a plain torch optimizer, but is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch optimizer, such as torch.optim.SGD(model.parameters(), 0.1), but is {_name(optimizer)} instead"
        )
    if (closure := inspect.signature(optimizer.step).parameters.get("closure")) is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"an optimizer must update from one gradient, but {type(optimizer).__name__} wants a closure, by which it evaluates the loss several "
            "times a step"
        )


def _name(thing: Any) -> str:
    """Of a class, or of the class of what is none."""
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _require_members(groups: Sequence[dict[str, Any]], model: nn.Module) -> None:
    members = {id(parameter) for parameter in trainable_parameters(model).values()}
    frozen = {id(parameter) for parameter in model.parameters()} - members
    for index, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in members | frozen:
                raise ConfigError(
                    f"every parameter of the optimizer must belong to the model, but parameter {position} (shape "
                    f"{list(parameter.shape)}) of group {index} does not; make the optimizer from model.parameters()"
                )
