"""`TrainStep`: one call a step, with the numbers of an eager loop, and on a GPU without its cost on the host."""

import contextlib
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import hora
from hora import events, log
from hora.comm.session import session
from hora.errors import ConfigError
from hora.sync.agreement import require_same_arguments
from hora.sync.captured import FLAG_ALGORITHM
from hora.sync.control import NOWHERE, Place, require_one_place
from hora.sync.finite import raise_everywhere
from hora.sync.fused import switches_off_on_device
from hora.sync.loss_scale import LossScale
from hora.sync.optimizer import DistributedOptimizer
from hora.train.precision import PRECISIONS
from hora.train.step.compiling import Compile, bytes_at_once, compiled
from hora.train.step.dealt import Batches, logical_ranks_of, of_step, on_device
from hora.train.step.fitting import FittingMicroBatches
from hora.train.step.forward import Forward, LossFunction, StepSums, agree_on_names
from hora.train.step.graph import CapturedStep, capture
from hora.train.step.rates import LearningRates
from hora.train.step.tree import UnknownContent, signature, to_device

_WARM_UP = 3
"""Eager steps before the first capture: optimizers make their state, cuDNN and compilers choose, NCCL connects."""
_MOST_GRAPHS = 16
_MOST_KEYS = 1024
_MANY_KEYS = 32

_EAGER, _CAPTURE, _REPLAY = 0.0, 1.0, 2.0
"""What a rank can do with a step; all do what the least able one can."""


class _Key(NamedTuple):
    """What a graph is good for: steps of one kind, as long as all lies where it lay."""

    kind: Any
    memory: tuple[int, ...]


class StepResult:
    """What came of a step, over all ranks and micro-batches. Numbers stay on the device until they are read.

    Attributes:
        weight: of the global batch: samples or tokens, float64.
        metrics: sums by name, float64.
    """

    def __init__(self, totals: Tensor, names: Sequence[str]) -> None:
        self._loss_sum, self.weight = totals[0], totals[1]
        self.metrics = dict(zip(names, totals[2:], strict=False))

    @property
    def loss(self) -> Tensor:
        """The mean loss of the global batch (sum over weight), float64; no number where no rank had a sample."""
        return self._loss_sum / self.weight

    def __repr__(self) -> str:
        return f"StepResult(loss={float(self.loss):.6g}, weight={float(self.weight):g}, metrics={ {k: float(v) for k, v in self.metrics.items()} })"


class TrainStep:
    """Trains `model` on one global batch a call: forward, backward, sums over the ranks, clipping, update.

    On a GPU a step is captured into a CUDA graph after a few eager ones, and replayed from then on, communication included: the host only
    starts it. Learning rates, random numbers and carried states stay live; what `loss_fn` computes in Python (a counter, an annealed factor, a
    metric given as a number) is frozen with the graph, unless it comes with the batch or the state. What cannot be captured runs eagerly, which
    is said once with the reason, and gives the same numbers. All ranks replay a step, or none.

    Collective: all ranks make it with the same arguments, and call it in step.

    Args:
        model: the module whose parameters `optimizer` updates.
        loss_fn: `loss_fn(model, micro_batch, state) -> (loss_sum, weight, metrics, state)`: the summed loss of the micro-batch as a scalar, how
            many samples or tokens that is (a number, or a scalar on the device), a dict of further sums, and what the micro-batch of this place
            in the next step is to be given as `state` (None at first): tensors, nested as one likes.
        optimizer: a `DistributedOptimizer` of the model, or a plain optimizer, which is wrapped in one.
        clip_norm: in the place of that of the optimizer, whose it becomes, if given.
        precision: "float32", "bfloat16" or "float16": what autocast computes in; parameters, gradients and updates are float32 in any case.
            With "float16" the loss is scaled: `loss_scale` adapts itself, the same on all ranks, and updates that overflow are left out.
        compile: True gives `model` to torch.compile; "parts" likewise, in about four parts whose gradients are summed one after the other during
            backward; "regions" its repeated blocks (layers of an `nn.ModuleList` or `nn.Sequential`), in place.
        capture: "auto", or False for eager steps only.
        micro_batch_size: "auto" cuts the micro-batches of the loader, along the first dimension of their tensors, until they fit into the memory of
            every rank; the global batch stays. One that is larger than any before is tried first, for which `loss_fn` is called once more.

    Attributes:
        optimizer: the `DistributedOptimizer`.
        states: what `loss_fn` has returned last, by place of the micro-batch on this rank; [] before the first step. May be set; to keep them, clone
            them, for a graph writes the next ones in their place.
        num_replayed: steps that were replayed from a graph.
        loss_scale: what losses are multiplied with for the backward pass, a scalar on the device; None unless precision is "float16".
        eager_because: why steps run eagerly here or on another rank; None while they can be captured.

    Raises:
        ConfigError: an argument is wrong, or as of `DistributedOptimizer`.
        CollectiveMismatch: ranks have given different ones.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        precision: str = "float32",
        compile: Compile = False,  # noqa: A002 (what torch calls it)
        capture: Literal["auto", False] = "auto",
        micro_batch_size: Literal["auto"] | None = None,
    ) -> None:
        if not callable(loss_fn):
            raise ConfigError(f"loss_fn must be a function, but is a {type(loss_fn).__name__} instead")
        if precision not in PRECISIONS:
            raise ConfigError(f"unknown precision {precision!r}; choose one of: {', '.join(PRECISIONS)}")
        if capture not in ("auto", False):
            raise ConfigError(f'capture must be "auto" or False, but is {capture!r} instead')
        if compile not in (True, False, "parts", "regions"):
            raise ConfigError(f'compile must be True, False, "parts" or "regions", but is {compile!r} instead')
        if micro_batch_size not in ("auto", None):
            raise ConfigError(f'micro_batch_size must be "auto" or None (give a number to the loader), but is {micro_batch_size!r} instead')
        if micro_batch_size == "auto" and session().exact is not None:
            raise ConfigError(
                "in exact mode the order of all sums is fixed from the beginning, and the memory of a rank must not change it: give the loader a "
                'micro_batch_size in the place of "auto"'
            )
        if not isinstance(optimizer, DistributedOptimizer):
            optimizer = DistributedOptimizer(optimizer, model)
        if not optimizer.serves(model):
            raise ConfigError("the optimizer must be a DistributedOptimizer of this model, but is one of another")
        if clip_norm is not None:
            optimizer.clip_norm = clip_norm
        if precision == "float16" and optimizer.synchronizer.settings.checks.non_finite == "ignore":
            raise ConfigError('precision="float16" must see which gradients are not finite: give Checks another non_finite than "ignore"')
        here = session()
        require_same_arguments(
            "TrainStep",
            precision=precision,
            compile=compile,
            capture=capture,
            clip_norm=optimizer.clip_norm,
            micro_batch_size=micro_batch_size,
        )
        self.optimizer = optimizer
        self.states: list[Any] = []
        self.num_replayed = 0
        self._model = model
        if (part_bytes := bytes_at_once(model, compile)) is not None:
            optimizer.synchronizer.expect_in_parts(part_bytes)
        scale = LossScale(here.device) if precision == "float16" else None
        self._forward = Forward(compiled(model, compile), loss_fn, optimizer, precision, scale)
        self._fitting = FittingMicroBatches(self._forward, self._tell) if micro_batch_size == "auto" else None
        self._number = next(here.plans)
        self._on_gpu = here.device.type == "cuda"
        self._fused = self._on_gpu and all(group.get("fused") for group in optimizer.param_groups)
        self._rates = LearningRates(optimizer.optimizer, here.device)
        self._stream = torch.cuda.Stream(here.device) if self._on_gpu else None
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._graphs: OrderedDict[_Key | None, CapturedStep] = OrderedDict()
        self._num_eager: OrderedDict[Any, int] = OrderedDict()
        self._said: set[str] = set()
        self._released_by: Any = None
        self.eager_because = self._never_captured_because() if capture == "auto" else "capture=False"
        if self.eager_because is not None and capture == "auto" and self._on_gpu:
            self._say_once(self.eager_because)
        if self.eager_because is None:
            raise_everywhere(torch.zeros((), device=here.device), FLAG_ALGORITHM)  # which cannot be done for the first time in a capture
            optimizer.synchronizer.pull_sums()
        elif capture is False and self._never_captured_because() is None and here.world_size > 2:
            optimizer.synchronizer.pull_sums()  # in whose order captured steps add up; that of two ranks is the same anyway

    def __call__(self, step: Iterable[Any]) -> StepResult:
        """Trains on one global batch.

        Collective: all ranks call it, also those whose `step` has no micro-batch.

        Args:
            step: this rank's micro-batches: a step of `hora.DataLoader` or `hora.TextStream`, or any iterable. Tensors on a CPU are brought to the
                device.

        Returns:
            Loss and metrics over all ranks, on the device.

        Raises:
            ConfigError: `loss_fn` returns something else than it should.
            OutOfMemory: with `micro_batch_size="auto"`: a rank cannot take even one sample.
            NonFiniteGradient: the gradient of this step, or on a GPU of one of the two before, was not finite (`hora.Checks`).
            CollectiveMismatch, CollectiveTimeout, PeerLost: as of `DistributedOptimizer`.
        """
        events.observer().on_mark(events.Mark.WINDOW_BEGIN)
        self.optimizer.synchronizer.require_even(step)
        if self._fitting is not None:
            step = of_step(step, self._fitting.fit(list(on_device(step)), self.states))
        if self.eager_because is not None:
            return self._eager(step)
        micro_batches = on_device(step)
        synchronizer, key = self.optimizer.synchronizer, self._key(micro_batches)
        synchronizer.trained.require_same()
        self._rates.refresh()
        place, ability = Place.of(step), self._ability(key)
        stop, able = self._agree(f"step {synchronizer.completed}", float(synchronizer.stop_requested), ability, place)
        if min(able) > _EAGER and (max(able) == min(able) == _REPLAY or self._capture_together(key, micro_batches, able)):
            return self._replay(self._graphs[key], micro_batches, stop=stop > 0)
        if key is not None:
            self._num_eager[key.kind] = self._num_eager.get(key.kind, 0) + 1
        if len(self._num_eager) > _MOST_KEYS:
            self._num_eager.popitem(last=False)
        if len(self._num_eager) > _MANY_KEYS and not self.num_replayed:
            self._say_once(
                "batches, states or settings of the optimizer (such as betas that a schedule changes) are other ones in each step"
            )
        return self._eager(micro_batches)

    @property
    def loss_scale(self) -> Tensor | None:
        """See the attributes of the class."""
        return None if self._forward.loss_scale is None else self._forward.loss_scale.value.clone()

    @property
    def micro_batch_size(self) -> int | None:
        """With "auto": most samples of a micro-batch, once one has been too large."""
        return None if self._fitting is None else self._fitting.most_samples

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside model and optimizer, the same on all ranks: the loss scale, and the micro-batches that fit, if these
        are looked for. Waits for the device.
        """
        scale = {} if self._forward.loss_scale is None else {"loss_scale": self._forward.loss_scale.state_dict()}
        return scale if self._fitting is None else {**scale, "micro_batch_size": self._fitting.most_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave; what is of no use with other arguments than there is left out.

        Raises:
            CheckpointMismatch: it is no such state.
        """
        if self._forward.loss_scale is not None and "loss_scale" in state:
            self._forward.loss_scale.load_state_dict(state["loss_scale"])
        if self._fitting is not None:
            self._fitting.most_samples = state.get("micro_batch_size")

    def release_graphs(self) -> None:
        """Gives back all graphs; NCCL does not end while one of them holds its calls."""
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()

    # Eagerly --------------------------------------------------------------------------------------------------------------------------------

    def _eager(self, step: Iterable[Any]) -> StepResult:
        sums = StepSums(self._forward, logical_ranks_of(step))
        with self._as_captured():
            given = (
                on_device(step) if session().exact else of_step(step, (to_device(micro_batch, session().device) for micro_batch in step))
            )
            states = self.states or []
            after = self._forward.run(given, states, sums)
            self.states = [*after, *states[len(after) :]]
            if not self._forward.agreed:
                agree_on_names(self._forward)
            sums.send()
            self.optimizer.step()
            totals = sums.total()
        return StepResult(totals, self._forward.names or ())

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """On a GPU: on the stream of captures and with rates on the device, so that replays give the same bits."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self._rates.lent() if self._fused else nullcontext():
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    # Captured -------------------------------------------------------------------------------------------------------------------------------

    def _never_captured_because(self) -> str | None:
        optimizer = self.optimizer
        if not self._on_gpu:
            return "CUDA graphs are for GPUs"
        if optimizer.synchronizer.has_sparse_gradients:
            return "sparse gradients have a new shape in each step"
        if optimizer.synchronizer.settings.wire_dtype is torch.float16:
            return "gradients that travel as float16 may be too large for it, of which their sums alone tell"
        if type(events.observer()) is not events.Observer and events.observer().needs_eager_steps:
            return "the run is observed"
        if not self._fused:
            return "updates that are not fused cannot be switched off on the device: make SGD, Adam or AdamW with fused=True"
        return None

    def _key(self, micro_batches: Batches) -> _Key | None:
        """What a graph is good for; None where there can be none."""
        if not micro_batches:
            return None
        try:
            trees = signature((list(micro_batches), self._states_for(micro_batches)))
        except UnknownContent as problem:
            self._say_once(str(problem))
            return None
        # A graph goes on with the memory that it was captured with: another one, as after load_state_dict, is another key.
        memory = tuple(tensor.data_ptr() for tensor in self._forward.lasting_tensors())
        modes = tuple(module.training for module in self._model.modules())
        return _Key((trees, logical_ranks_of(micro_batches), modes, self.optimizer.clip_norm, self._rates.other_settings()), memory)

    def _states_for(self, micro_batches: Batches) -> list[Any]:
        """One for each, None where there has been none."""
        states = (self.states or [])[: len(micro_batches)]
        return [*states, *[None] * (len(micro_batches) - len(states))]

    def _ability(self, key: _Key | None) -> float:
        """What this rank can do with a step of this key."""
        if key is None:
            return _EAGER
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return _REPLAY
        if not self._forward.agreed or not switches_off_on_device(self.optimizer.applied):
            return _EAGER
        return _CAPTURE if self._num_eager.get(key.kind, 0) >= (1 if self._graphs else _WARM_UP) else _EAGER

    def _agree(self, what: str, most: float, own: float, place: Place = NOWHERE) -> tuple[float, list[float]]:
        """All ranks say how they can go on, in the same step of the data: the largest of the first numbers, and the second one of each rank."""
        here = session()
        call = here.progress.begin("train step", [])
        events.observer().on_mark(events.Mark.AGREE_BEGIN)
        said = here.roll_call.begin(f"{what} of train step {self._number}", call, numbers=(most, own, *place), waits=True).wait()
        events.observer().on_mark(events.Mark.AGREE_END)
        here.progress.end(call)
        require_one_place([(epoch, step) for _, _, epoch, step, *_ in said])
        return max(numbers[0] for numbers in said), [own for _, own, *_ in said]

    def _tell(self, what: str, number: float) -> list[float]:
        return self._agree(what, 0.0, number)[1]

    def _capture_together(self, key: Any, micro_batches: Batches, able: Sequence[float]) -> bool:
        """Captures where there is no graph yet; whether all ranks have one now."""
        problem: str | None = None
        self.optimizer.settle_checks()
        if able[session().rank] == _CAPTURE:
            try:
                self._capture(key, micro_batches)
            except Exception as error:  # the others wait to hear of it
                problem = _say_where(error)
        _, fine = self._agree("capture", 0.0, float(problem is None))
        if min(fine) > 0:
            return True
        self.release_graphs()
        self.optimizer.synchronizer.stop_pulling()
        ranks = [rank for rank, good in enumerate(fine) if not good]
        self.eager_because = problem or f"rank {ranks[0]} could not capture it"
        self._say_once(self.eager_because)
        return False

    def _say_once(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.get_logger().warning("steps are not captured into a CUDA graph but run eagerly: %s", reason)

    def _capture(self, key: Any, micro_batches: Batches) -> None:
        here = session()
        if self._released_by is not here:
            here.release.callback(_release, weakref.ref(self))
            self._released_by = here
        checks = self.optimizer.synchronizer.captured_checks()
        states = self._states_for(micro_batches)
        assert self._stream is not None
        self._graphs[key] = capture(self._forward, micro_batches, states, self._rates, checks, self._stream, self._pool)
        if len(self._graphs) > _MOST_GRAPHS:
            _, oldest = self._graphs.popitem(last=False)
            oldest.graph.reset()

    def _replay(self, captured: CapturedStep, micro_batches: Batches, *, stop: bool) -> StepResult:
        here, synchronizer = session(), self.optimizer.synchronizer
        step = synchronizer.completed
        checks = synchronizer.captured_checks()
        events.observer().on_mark(events.Mark.DEVICE_BEGIN)
        checks.before_replay()
        events.observer().on_mark(events.Mark.DEVICE_END)
        events.fault_point(f"step.{step}.before", rank=here.rank)
        events.observer().on_mark(events.Mark.REPLAY_BEGIN)
        totals, states, weight = captured.replay(micro_batches, self._states_for(micro_batches))
        events.observer().on_mark(events.Mark.REPLAY_END)
        self.states = [*states, *(self.states or [])[len(states) :]]
        if captured.grad_norm is not None:
            self.optimizer.last_grad_norm = captured.grad_norm.clone()
        checks.after_replay(step)
        synchronizer.count_replay(weight, stop=stop)
        self.num_replayed += 1
        self.optimizer.count_update()
        events.observer().on_mark(events.Mark.UPDATE_END)
        events.fault_point(f"step.{step}.after", rank=here.rank)
        return StepResult(totals, self._forward.names or ())


def _release(train_step: "weakref.ref[TrainStep]") -> None:
    if (there := train_step()) is not None:
        there.release_graphs()


_OURS_AND_TORCHS = tuple(f"{Path(str(module.__file__)).parent}/" for module in (hora, torch))


def _say_where(error: BaseException) -> str:
    """The error that came first, and the user's line that it comes from."""
    while error.__context__ is not None:  # ending a capture that has failed fails too
        error = error.__context__
    text = " ".join(str(error).split("\n")[0].split())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS_AND_TORCHS)]
    frames = [frame for frame in frames if frame.filename != contextlib.__file__]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"
