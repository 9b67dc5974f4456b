"""The gradient synchroniser of one model: when the last backward pass of a step has returned, `.grad` is that of the global batch.

A *window* is the backward passes that make one update. It is driven in one of two ways, never both: *explicitly* by
`DistributedOptimizer.micro_batches` and `.backward`, which say what the last pass is and how much each micro-batch weighs, or *plainly* by
`loss.backward()`, where hooks count the passes and each rank weighs the same. All optimizers of a model share its synchroniser.

Relies on strategies (which send the buckets) and on `ControlMessage` (weight and flags). Does not clip or update.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hora import events
from hora.comm.session import session
from hora.comm.torch_private import is_last_hook
from hora.errors import ConfigError
from hora.plan.buckets import BucketFacts, assign_buckets, default_cap_bytes, digest, order_in_parts
from hora.sync import strategies
from hora.sync.agreement import require_same_parameters
from hora.sync.arrivals import Arrivals
from hora.sync.autograd import at_end_of_backward
from hora.sync.batch_norm import SyncedNorms
from hora.sync.captured import CapturedChecks, GivenWeight, StepWeight
from hora.sync.control import NOWHERE, ControlMessage, Place
from hora.sync.finite import FiniteGradients
from hora.sync.fused import switches_off_on_device
from hora.sync.given import require_losses, require_weight
from hora.sync.gradients import GradientBucket, divide_all, same_memory
from hora.sync.loss_scale import LossScale
from hora.sync.narrow import make_sums
from hora.sync.parameters import broadcast_parameters
from hora.sync.settings import SyncSettings
from hora.sync.sharded import ShardedBucket, make_sharded
from hora.sync.sparse import sum_sparse_gradient
from hora.sync.sums import AgreedSums, NativeSums, Sums
from hora.sync.trained import TrainedParameters
from hora.sync.turns import ExactTurns, PlainTurns, Turns

FIRST_BUCKET_CAP_BYTES = 2**20

_CHUNK = 16
"""Elements of which chunks that a rank adds up are whole multiples, so that a GPU reads them 16 bytes at a time."""

T = TypeVar("T")


class Phase(Enum):
    """Where a window stands."""

    OPEN = auto()
    """Gradients accumulate on this rank (or none has come yet)."""
    LAST = auto()
    """The last backward pass runs; buckets may be on their way."""
    COMPLETE = auto()
    """`.grad` is the gradient of the global batch."""


class GradientSynchronizer:
    """Sums the gradients of `model` over the ranks once a window.

    Collective: made by all ranks; checks that they have the same parameters and gives everybody rank 0's parameters and buffers.

    Raises:
        CollectiveMismatch: the ranks' models differ; names the first parameter.
        ConfigError: the model has no trainable parameter, the strategy is unknown, or a setting is none for exact mode.
    """

    def __init__(self, model: nn.Module, settings: SyncSettings):
        self.settings = settings
        self.completed = 0
        self.local_weight: float | Tensor = 0.0
        self.stop_requested = False
        self.serves_optimizers = False
        self.applied_to_shards: torch.optim.Optimizer | None = None
        self.trained = TrainedParameters(model)
        self._names, self._parameters = list(self.trained.named), list(self.trained.named.values())
        facts = self.trained.facts
        self._plans = plans = assign_buckets(facts, settings.bucket_cap_bytes or default_cap_bytes(facts), FIRST_BUCKET_CAP_BYTES)
        here, number = session(), next(session().plans)
        if here.exact is not None and settings.wire_dtype is not None:
            raise ConfigError(
                "wire_dtype rounds the gradient of each rank, and exact mode has the same bits on any number of them; leave one out"
            )
        # With its number, so that two models alike are not taken for each other.
        plan_digest = f"{number} {digest(facts, plans)}"
        require_same_parameters(facts, plan_digest, str(settings))
        broadcast_parameters(model)
        members_of = [[self._parameters[member] for member in members] for members in plans]
        self.sharded: list[ShardedBucket] | None = None
        sums: Sums | None = None
        if settings.strategy == "sharded":
            self.trained.require_shardable()
            self.sharded, sums = make_sharded(members_of, here, settings.wire_dtype)
        chunks = _CHUNK * here.world_size if here.exact or settings.wire_dtype else 1
        self._buckets: Sequence[GradientBucket] = self.sharded or [GradientBucket(members, chunks) for members in members_of]
        for index, (bucket, plan) in enumerate(zip(self._buckets, plans, strict=True)):
            bucket.facts = BucketFacts(number, index, tuple(self._names[member] for member in plan), bucket.buffer.nbytes)
        self._sparse = [parameter for parameter, fact in zip(self._parameters, facts, strict=True) if fact.sparse]
        self._place = {member: (b, m) for b, members in enumerate(plans) for m, member in enumerate(members)}
        self._turns: Turns = (
            ExactTurns(model, self._buckets, here, digest(facts, []))
            if here.exact
            else PlainTurns(sums or make_sums(self._buckets, settings.wire_dtype, here))
        )
        self._control: ControlMessage | GivenWeight = ControlMessage(
            plan_digest, f"model {number} ({self.trained})", here.device, here.exact.logical_ranks if here.exact else 1
        )
        self._sums = AgreedSums(self._turns.sums, self._agree_on_divisor, self._has_left)
        self._strategy = strategies.make(settings.strategy, self._buckets, self._sums)
        self.finite: FiniteGradients | CapturedChecks = FiniteGradients(
            self._names, self._parameters, self._buckets, self._sparse, settings.checks.non_finite, in_parts=self.sharded is not None
        )
        self._phase = Phase.OPEN
        self._passes = 0
        self._weights: dict[int, float | Tensor] = {}
        self._data_step = NOWHERE
        self._next_is_last: bool | None = None
        self._awaits_backward = True
        self._explicit = False
        self._driven = False
        self._in_plain_pass = False
        self._passed_through = False
        self._undriven = False
        self._seen: tuple[int, Tensor | None] = (0, None)
        self._in_loop = self._has_gradient = self._torn = False
        self._applied = True
        self._discarded = 0
        self._coming: Arrivals | None = None
        self._loss_scale: LossScale | None = None
        self._handles = [self._hook(index) for index in range(len(self._parameters))]
        self._synced_norms = SyncedNorms(model)

    # What the optimizers call -----------------------------------------------------------------------------------------------------------

    @property
    def stop_agreed(self) -> bool:
        """Whether some rank asked to stop; the same on every rank at the same step."""
        return self._control.stop_agreed

    def switches_off_on_device(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an update by `optimizer` that is not finite can be left out by the device, unseen by the hosts; the same on every rank."""
        return switches_off_on_device(optimizer) if self.applied_to_shards is None else not self._control.waits_agreed

    def micro_batches(self, step: Iterable[T]) -> Iterator[T]:
        """Yields the micro-batches of `step` as one window. Collective: all ranks, also those whose `step` is empty.

        A rank whose loop body never reaches a last `backward` (no micro-batch, or one skipped) takes part with what it has.
        """
        self.require_even(step)
        self._begin_explicit_window()
        self._data_step = Place.of(step)
        with self._turns.window(step), self._looping():
            remaining = iter(step)
            current = next(remaining, _END)
            while current is not _END:
                following = next(remaining, _END)
                self._next_is_last, self._awaits_backward = following is _END, True
                self._turns.next_micro_batch()
                self._has_gradient = bool(self._weights) and self._holds_gradients()
                yield current  # type: ignore[misc]
                current = following
        self._next_is_last = None
        if self._phase is not Phase.COMPLETE:
            self._complete_without_backward()

    def require_even(self, step: Iterable[Any]) -> None:
        """Refuses a step in which ranks would wait in a SyncBatchNorm for others; on every rank alike."""
        self._synced_norms.require_even(step)

    def backward(self, losses: Sequence[Tensor], weight: float | Tensor) -> None:
        """Adds the gradients of `losses` (sums over one micro-batch that weighs `weight`) to the window; completes it if this is the last."""
        require_weight(weight)
        require_losses(losses)
        last, scale = self._next_pass_is_last(), self._loss_scale
        self._require_whole()
        self._add_weight(weight)
        if last:
            self._begin_last()
        self._driven = True
        try:
            with torch.autograd.set_multithreading_enabled(False):  # to hand a backward to the GPU's thread takes longer than a bucket
                torch.autograd.backward(tuple(losses) if scale is None else tuple(loss.float() * scale.value for loss in losses))
        except BaseException:
            self._torn = True
            raise
        finally:
            self._driven = False
        self.finite.note(losses, last=last)
        if last:
            self._complete()

    @contextmanager
    def scaled(self, loss_scale: LossScale | None) -> Iterator[None]:
        """Inside the `with` block, which holds whole explicit windows, gradients come of losses times `loss_scale`, and are divided by it again."""
        outside, self._loss_scale = self._loss_scale, loss_scale
        try:
            yield
        finally:
            self._loss_scale = outside

    def before_update(self, completed_before: int) -> None:
        """Makes sure that a window was completed since `completed_before`; what a plain loop left open is summed now.

        Raises:
            ConfigError: the explicit window is not complete.
        """
        self._require_driven()
        if self.completed == max(completed_before, self._discarded):
            if self._explicit:
                raise ConfigError(
                    "step() must follow the last backward of a window, but none has completed since the last step(): run the loop over "
                    "optimizer.micro_batches(step) to its end and call optimizer.backward(loss_sum, weight=n) for each micro-batch"
                )
            if self._passed_through:
                raise ConfigError(
                    f"step() must follow a backward of its own optimizer, but the gradients of this model ({self.trained}) came of another one's "
                    "backward(loss_sum, weight=n), which sums and divides those of its own model alone: put models that share a loss into one "
                    "nn.ModuleList, and make the DistributedOptimizer of that"
                )
            self.trained.require_same()
            self._turns.require_plain()
            self._weights = {self._turns.part: 1.0}
            self._begin_last()
            self._complete()
        self._applied = True

    def reset(self) -> None:
        """Begins a new window; the gradients were cleared, and with them a complete window that nobody has applied."""
        self._require_unbroken()
        if self._in_loop and self._weights and self._phase is Phase.OPEN and not self._torn:
            raise ConfigError(_CLEARED)
        if self._phase is Phase.COMPLETE and not self._applied:
            self._discarded = self.completed
        self._open()

    # Updates that are replayed from CUDA graphs -------------------------------------------------------------------------------------------

    def captured_checks(self) -> CapturedChecks:
        """The look at gradients of updates that are replayed; made once, and settled with that at others."""
        assert isinstance(self.finite, FiniteGradients)
        if not isinstance(self.finite.captured, CapturedChecks):
            self.finite.captured = CapturedChecks(self._names, self._parameters, self.settings.checks.non_finite, self.settings.wire_dtype)
        return self.finite.captured

    @contextmanager
    def standing_in(self, weight: StepWeight, checks: CapturedChecks) -> Iterator[None]:
        """Inside the `with` block a window is as others to the device, and none to the hosts."""
        outside = self._control, self.finite, self.completed, self.local_weight
        # A graph that added to the weight of the steps before would read it in each replay, when its memory is long given back.
        self._control, self.finite, self.local_weight = GivenWeight(weight), checks, 0.0
        try:
            with ExitStack() as stack:
                for bucket in self._buckets if checks.are_on and session().exact is None else ():
                    stack.enter_context(bucket.marking())
                stack.enter_context(session().progress.uncounted())
                stack.enter_context(events.observe(events.Observer()))
                yield
        except BaseException:
            self._clear_gradients()  # whose memory is the graph's
            raise
        finally:
            self._control, self.finite, self.completed, self.local_weight = outside
            self._coming = None
            self._phase, self._applied, self._next_is_last, self._explicit = Phase.OPEN, True, None, True

    @contextmanager
    def capturing(
        self, weight: StepWeight, checks: CapturedChecks, graph: torch.cuda.CUDAGraph, num_micro_steps: int
    ) -> Iterator[Callable[[Any], None]]:
        """Inside the `with` block a window is captured into `graph`; gives what must be called with a step before its replay."""
        with self.standing_in(weight, checks), self._turns.captured(graph, num_micro_steps) as prepare_replay:
            yield prepare_replay

    def arrivals(self) -> Arrivals:
        """The buckets of the window that has just been captured; in the place of gradients."""
        assert self._coming is not None
        coming, self._coming = self._coming, None
        return coming

    def count_replay(self, weight: float | Tensor, *, stop: bool) -> None:
        """An update has been replayed, in which this rank's samples weighed `weight`; `stop`: a rank has asked to stop."""
        for bucket in self._buckets if self.sharded is None else ():
            if bucket.parameters[0].grad is not bucket.views[0]:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.grad = view
        self.local_weight = self.local_weight + weight
        self.completed += 1
        self._control.stop_agreed = stop
        self._phase, self._applied, self._seen = Phase.COMPLETE, True, (0, None)

    def pull_sums(self) -> None:
        """From now on copy engines move the gradients, if they are many and the GPUs of all ranks share memory; again does nothing.

        Collective. For windows that are captured: it takes a host three times as long to begin such a sum as one of NCCL's.
        """
        if (sums := self._native_sums) is not None:
            sums.pull_where_shared(session())

    def stop_pulling(self) -> None:
        """From now on the backend sums the gradients again. Collective."""
        if self._native_sums is not None:
            self._native_sums.stop_pulling()

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank's GPU that torch's allocator does not count, since the other GPUs map it."""
        return 0 if (sums := self._native_sums) is None else sums.shared_bytes

    @property
    def _native_sums(self) -> NativeSums | None:
        """The sums, if they are the backend's own, of all gradients and as wide as these."""
        sums = self._turns.sums
        return sums if type(sums) is NativeSums else None

    def expect_in_parts(self, part_bytes: int) -> None:
        """Gradients come in parts of so many bytes, as of a compiled model (`plan.buckets.order_in_parts`)."""
        self._strategy.order = order_in_parts(self.trained.facts, self._plans, part_bytes)

    def close(self) -> None:
        """Removes the hooks; the model is as it was."""
        self.trained.close()
        for handle in self._handles:
            handle.remove()

    @property
    def has_sparse_gradients(self) -> bool:
        """Whether a parameter gets sparse gradients."""
        return bool(self._sparse)

    def sparse_among(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """The names of those that get sparse gradients."""
        sparse = {id(parameter) for parameter in self._sparse}
        return [self.trained.names[id(parameter)] for parameter in parameters if id(parameter) in sparse]

    # Explicit windows -------------------------------------------------------------------------------------------------------------------

    def _begin_explicit_window(self) -> None:
        if self.settings.accumulation_steps != 1:
            raise ConfigError("micro_batches decides itself what the last backward is: use it with accumulation_steps=1, the default")
        events.observer().on_mark(events.Mark.WINDOW_BEGIN)
        self._explicit = True
        self._require_unbroken()
        self.trained.require_same()
        self._clear_gradients()
        self._open()
        self._next_is_last = None

    @contextmanager
    def _looping(self) -> Iterator[None]:
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False

    def _next_pass_is_last(self) -> bool:
        self._explicit = True
        if self._next_is_last is not None:
            if not self._awaits_backward:
                raise ConfigError(
                    "a micro-batch must have one backward, but a second one came"
                    + (" after the last" if self._phase is Phase.COMPLETE else "")
                    + ": pass both losses in one call, optimizer.backward([loss_a, loss_b], weight=n)"
                )
            self._awaits_backward = False
            return self._next_is_last
        self._turns.require_plain()
        if self._phase is Phase.COMPLETE:
            self._require_applied()
            self._clear_gradients()
            self._open()
        if self._passes == 0:
            self.trained.require_same()
        self._passes += 1
        return self._passes == self.settings.accumulation_steps

    def _complete_without_backward(self) -> None:
        self._require_whole()
        self._begin_last()
        self._complete()

    # Plain windows ----------------------------------------------------------------------------------------------------------------------

    def _hook(self, index: int) -> RemovableHandle:
        weak_self = weakref.ref(self)

        def on_gradient(_: Tensor) -> None:
            synchronizer = weak_self()
            if synchronizer is not None:
                synchronizer._on_gradient(index)

        return cast(RemovableHandle, self._parameters[index].register_post_accumulate_grad_hook(on_gradient))

    def _on_gradient(self, index: int) -> None:
        if not self._driven:
            if self._explicit:
                under_way = not self._applied if self._phase is Phase.COMPLETE else self._in_loop
                if under_way and not _somebody_drives():
                    self._undriven = True
                return  # another optimizer's backward runs through this model (a GAN's generator through its discriminator)
            if not self._in_plain_pass:
                if _somebody_drives():
                    self._passed_through = True
                    return  # likewise, of one that has not been driven yet
                self._begin_plain_pass(index)
        if self._phase is Phase.LAST and (place := self._place.get(index)) is not None:
            settled = is_last_hook(self._parameters[index], self._handles[index].id)
            if torch.is_grad_enabled():  # backward(create_graph=True)
                with torch.no_grad():
                    self._strategy.ready(*place, settled=settled)
            else:
                self._strategy.ready(*place, settled=settled)

    def _begin_plain_pass(self, index: int) -> None:
        self._turns.require_plain()
        self._require_undivided()
        self._passed_through = False
        if self._phase is Phase.COMPLETE:
            if self._accumulated_on_complete(index):
                self._require_applied()
            self._open()
        elif self._passes > 0 and self._seen[1] is not None and self._parameters[self._seen[0]].grad is not self._seen[1]:
            self._open()  # model.zero_grad() has cleared, unseen, what the passes before had left
        if self._passes == 0:
            self.trained.require_same()
            if self.settings.accumulation_steps > 1:
                self._seen = (index, self._parameters[index].grad)
        self._passes += 1
        last = self._passes == self.settings.accumulation_steps
        self._in_plain_pass = True
        told = at_end_of_backward(self._end_plain_pass)
        if last and told:  # else step() sums what this and later passes leave
            self._weights = {self._turns.part: 1.0}
            self._begin_last()

    def _end_plain_pass(self) -> None:
        self._in_plain_pass = False
        self._seen = (self._seen[0], self._parameters[self._seen[0]].grad)  # which hooks of the user's may have replaced
        if self._phase is Phase.LAST:
            self._complete()

    def _accumulated_on_complete(self, index: int) -> bool:
        """Whether this pass added to a complete gradient, and not to one that was cleared by `model.zero_grad()` unseen.

        Under strategy "sharded" the parameters have no gradient then in any case, and only `optimizer.zero_grad()` is known to have cleared it.
        """
        if index not in self._place or self.sharded is not None:
            return True
        bucket, member = self._place[index]
        gradient = self._parameters[index].grad
        return gradient is not None and same_memory(gradient, self._buckets[bucket].views[member])

    def _require_undivided(self) -> None:
        """Where gradients are scattered, one of two models with a parameter in common would take that parameter's from the other."""
        for other in session().synchronizers.values():
            if other is not self and not other._explicit and (self.sharded is not None or other.sharded is not None):
                mine, theirs = self.trained.names, other.trained.names
                if shared := [name for parameter, name in mine.items() if parameter in theirs]:
                    raise ConfigError(
                        'where strategy "sharded" is used a plain loss.backward() must go through the parameters of one model, but '
                        f"{shared[0]!r} belongs to another one too, for which a DistributedOptimizer was made: loop over "
                        "optimizer.micro_batches(step) and call optimizer.backward(loss_sum, weight=n), which say whose the gradient is"
                    )

    def _require_unbroken(self) -> None:
        """A rank alone may begin anew after an exception in its last backward; among others it has broken off what they go on with."""
        if self._phase is Phase.LAST and session().world_size > 1:
            raise ConfigError(
                "a step must be summed on all ranks or none, but an exception has ended the last backward of this one after its sums had begun; let "
                "the exception end the job and resume, or catch it before backward"
            )

    def _require_whole(self) -> None:
        """Refuses to go on with gradients of which a part is missing, where their weights count whole."""
        if self._torn:
            raise ConfigError(
                "a step must have the whole gradient of each micro-batch, but an exception has ended the backward of one before: let the exception "
                "end the job and resume, or catch it before backward"
            )
        self._require_driven()
        if self._has_gradient and not self._holds_gradients():
            raise ConfigError(_CLEARED)

    def _require_driven(self) -> None:
        """Refuses gradients of which nobody has said how much they weigh, and those that came on top of complete ones."""
        if self._undriven:
            raise ConfigError(
                "from optimizer.micro_batches(step) to step() each backward through the model must be optimizer.backward(loss_sum, weight=n), which "
                "says how much it weighs, but loss.backward() was called, which adds its gradients to the others; gradients of inputs alone come "
                "from torch.autograd.grad(loss, inputs)"
            )

    def _holds_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def _require_applied(self) -> None:
        if not self._applied:
            raise ConfigError(
                "a backward came after the last of its window, before step() or zero_grad(): loop over the micro-batches of a step by "
                "optimizer.micro_batches(step), or say accumulation_steps=k; sum several losses into one backward "
                "(optimizer.backward([loss_a, loss_b], weight=n)); with torch.utils.checkpoint pass use_reentrant=False"
            )

    # Both -------------------------------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.finite.begin()
        self._phase, self._passes, self._weights, self._in_plain_pass, self._data_step = Phase.OPEN, 0, {}, False, NOWHERE
        self._passed_through = self._undriven = self._has_gradient = self._torn = False

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _add_weight(self, weight: float | Tensor) -> None:
        part = self._turns.part
        # In float64, whatever the type of a tensor: float32, which torch would take for integers, cannot say 2^24 + 1.
        added = weight.detach().to(torch.float64, copy=True) if isinstance(weight, Tensor) else float(weight)
        self._weights[part] = self._weights[part] + added if part in self._weights else added

    def _begin_last(self) -> None:
        self._phase = Phase.LAST
        # Each rank's shards have a state of their own, or there are none.
        waits = self.applied_to_shards is not None and not switches_off_on_device(self.applied_to_shards)
        self._control.begin(self.completed, self._data_step, self._weights, self.stop_requested, waits)
        events.observer().on_mark(events.Mark.LAST_BACKWARD)
        self._turns.begin_last()
        self._strategy.begin()
        if (sums := self._native_sums) is not None and isinstance(self._control, GivenWeight) and self._loss_scale is None:
            sums.divide_by(self._control.soon())

    @torch.no_grad()
    def _complete(self) -> None:
        events.observer().on_mark(events.Mark.BACKWARD_END)
        total_weight = self._control.end()
        self._strategy.end()
        self.finite.keep_own()
        self._turns.complete(self._weights, total_weight)
        divisor = self._with_scale(total_weight)
        if isinstance(self.finite, CapturedChecks):
            self._coming = Arrivals(self._buckets, self._sums.arrivals(), divisor)
            self._look(self.finite)
        else:
            for _ in self._sums.arrivals():
                pass
            events.observer().on_mark(events.Mark.SUMS_END)
            for parameter in self._sparse:
                sum_sparse_gradient(parameter, divisor)
            self._look(self.finite)
            divide_all(self._buckets, divisor)
            for bucket in self._buckets:
                bucket.unpack()
        self.local_weight = sum(self._weights.values(), start=self.local_weight)
        self.completed += 1
        self._phase, self._applied = Phase.COMPLETE, False
        self._seen = (0, None)
        self._tell_observer()

    def _look(self, finite: FiniteGradients | CapturedChecks) -> None:
        flag = finite.look(self.completed, self._control.suspicious, self._loss_scale)
        if self._loss_scale is not None and flag is not None:
            self._loss_scale.adapt(flag, self._control.suspicious)

    def _has_left(self, bucket_index: int) -> None:
        if isinstance(self.finite, CapturedChecks) and session().exact is None:  # there `.grad` is that of the last logical rank alone
            self.finite.look_early(self._buckets[bucket_index])

    def _agree_on_divisor(self) -> Tensor | None:
        total_weight = self._control.agree()
        return None if total_weight is None else self._with_scale(total_weight)

    def _with_scale(self, total_weight: Tensor) -> Tensor:
        return total_weight if self._loss_scale is None else total_weight * self._loss_scale.value

    def _tell_observer(self) -> None:
        observer = events.observer()
        if type(observer).on_gradient is not events.Observer.on_gradient:
            for name, parameter in self.trained.named.items():
                observer.on_gradient(name=name, gradient=parameter.grad)


def _somebody_drives() -> bool:
    """Whether the backward that runs is that of an explicit window."""
    return any(other._driven for other in session().synchronizers.values())


_END = object()

_CLEARED = (
    "the gradients of a step's micro-batches add up, but were cleared between two of them: leave out zero_grad() inside the loop; "
    "optimizer.micro_batches(step) clears them when it begins"
)
