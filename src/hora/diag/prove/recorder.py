"""Records what a script does, step by step, in each of its processes. Begins when torch has been imported.

A step is one outermost `optimizer.step()`. Gradients are taken when the innermost optimizer is about to use them, all else when the outermost one
is done. Draws no random number and changes no bit of the script's, unless an ablation was asked for. Public interfaces of torch only.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hora import env, events
from hora.comm.torch_private import version_of
from hora.diag.prove.ablation import Ablation
from hora.diag.prove.forwards import Forwards
from hora.diag.prove.losses import Losses
from hora.diag.prove.naming import Naming, bypassed_wrappers, is_plain
from hora.diag.prove.records import END, StepRecord, TensorFacts, record_path, write_begun, write_record
from hora.diag.prove.samplers import Samplers
from hora.diag.prove.sketch import sketch
from hora.errors import ConfigError
from hora.topology import Topology

_LEAVING_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.01

Tensors = dict[str, dict[str, TensorFacts]]


def start(environ: Mapping[str, str] = os.environ) -> None:
    """Begins to record in this process, as the variables say."""
    recorder = Recorder(Path(environ[env.PROVE]), int(environ[env.PROVE_STEPS]), Ablation.from_env(environ))
    recorder.install()


class Recorder:
    """Everything that is known of this process's training.

    Args:
        directory: where records go.
        steps: after how many the script ends.
        ablation: what is taken out of the script.
    """

    def __init__(self, directory: Path, steps: int, ablation: Ablation):
        self._directory = directory
        self._steps = steps
        self._ablation = ablation
        self._losses = Losses(ablation)
        self._forwards = Forwards(ablation, self._on_call, lambda: self._losses.running)
        self._samplers = Samplers()
        self._naming = Naming()
        self._optimizers: list[Optimizer] = []
        self._samples: list[int] = []
        self._first: dict[int, TensorFacts] = {}
        self._gradients: dict[str, TensorFacts] = {}
        self._groups: tuple[dict[str, Any], ...] = ()
        self._trained: dict[int, nn.Module] = {}
        self._bypassed = False
        self._taken: dict[str, tuple[Tensor, int]] = {}
        self._depth = 0
        self._step = 0
        self._failed = False
        self._ended = False
        self._place = (0, 1)

    def install(self) -> None:
        """Puts itself into torch and Hora."""
        self._ablation.install()
        self._losses.install()
        self._forwards.install()
        self._samplers.install()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._observing = events.observe(_Listener(self._samples))
        self._observing.__enter__()
        sys.excepthook = self._noting_failure(sys.excepthook)
        atexit.register(self._end)

    # What the script does -----------------------------------------------------------------------------------------------------------------

    def _on_call(self, root: nn.Module, trains: bool) -> None:
        self._samplers.settle(trains=trains)
        if trains:
            self._trained.setdefault(id(root), root)
            if not self._forwards.training:
                write_begun(self._directory, _place()[0], self._step + 1)
        if self._naming.add(root) and self._step == 0:
            for tensor in (*root.parameters(), *root.buffers()):
                if id(tensor) not in self._first and is_plain(tensor):
                    self._first[id(tensor)] = facts_of(tensor)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._depth == 0:
            if self._step == self._steps:
                self._leave()
            if self._step == 0:
                self._write_first(optimizer)
            self._gradients = {}
        self._depth += 1
        self._taken = {}
        self._take_gradients(optimizer)
        self._groups = tuple(_hyperparameters(group) for group in optimizer.param_groups)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._taken:  # the innermost: a step() that sums gradients itself, before it calls the one it overrides, has done so by now
            self._take_gradients(optimizer)
            self._taken = {}
        self._depth -= 1
        if self._depth > 0:
            return
        self._step += 1
        tensors = {
            "gradient": self._gradients,
            "parameter": _facts(self._naming.parameters() | self._parameters_of(optimizer)),
            "buffer": _facts(self._naming.buffers()),
            "state": self._state_of(optimizer),
        }
        self._write(self._step, tensors, self._ordinal(optimizer))

    def _take_gradients(self, optimizer: Optimizer) -> None:
        """Takes the gradients that have changed since they were last taken; an outer optimizer's other gradients stay."""
        for name, parameter in self._parameters_of(optimizer).items():
            gradient = parameter.grad
            if gradient is None or not is_plain(gradient):
                continue
            taken = self._taken.get(name)
            if taken is None or taken[0] is not gradient or taken[1] != version_of(gradient):
                # The tensor itself, as another may have the same id once it is gone.
                self._taken[name] = gradient, version_of(gradient)
                self._gradients[name] = facts_of(gradient)

    # Records ------------------------------------------------------------------------------------------------------------------------------

    def _write_first(self, optimizer: Optimizer) -> None:
        wrappers = bypassed_wrappers(self._trained.values())
        self._bypassed = bool(wrappers)
        self._naming.prefer(wrappers)
        named = {"parameter": self._parameters_of(optimizer) | self._naming.parameters(), "buffer": self._naming.buffers()}
        first = {
            kind: {name: self._first.get(id(tensor)) or facts_of(tensor) for name, tensor in tensors.items() if is_plain(tensor)}
            for kind, tensors in named.items()
        }
        rank, world_size = _place()
        write_record(self._directory, StepRecord(rank, world_size, 0, tensors=first))
        self._first = {}

    def _write(self, step: int, tensors: Tensors, ordinal: int) -> None:
        rank, world_size = self._place = _place()
        training, evaluation, random_moved = self._forwards.take()
        record = StepRecord(
            rank=rank,
            world_size=world_size,
            step=step,
            optimizer=ordinal,
            tensors=tensors,
            forwards=training,
            evaluation=evaluation,
            micro_steps=self._losses.take(),
            groups=self._groups,
            samples=tuple(self._samples),
            notes={
                "random_moved": random_moved,
                "batch_norms": self._naming.batch_norms(),
                "bypassed": self._bypassed,
                "repeated_epoch": self._samplers.repeated,
                "exact": _exact(),
                "torch": torch.__version__,
            },
        )
        write_record(self._directory, record)
        self._samples.clear()

    def _end(self) -> None:
        """Keeps what was evaluated after the last step, and that this rank is through."""
        if self._ended or self._step == 0:
            return
        self._ended = True
        _, evaluation, _ = self._forwards.take()
        rank, world_size = self._place  # the group may be gone by now
        notes = {"repeated_epoch": self._samplers.repeated, "failed": self._failed}
        write_record(self._directory, StepRecord(rank, world_size, END, evaluation=evaluation, notes=notes))

    def _noting_failure(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def note(*error: Any) -> Any:
            self._failed = True
            return hook(*error)

        return note

    def _leave(self) -> None:
        """Ends the script once all ranks are here: one that goes early would break the others' collectives."""
        self._end()
        world_size, end_s = self._place[1], time.monotonic() + _LEAVING_TIMEOUT_S
        while time.monotonic() < end_s:
            if all(record_path(self._directory, rank, END).exists() for rank in range(world_size)):
                break
            time.sleep(_POLL_S)
        raise SystemExit(0)

    # Names --------------------------------------------------------------------------------------------------------------------------------

    def _parameters_of(self, optimizer: Optimizer) -> dict[str, Tensor]:
        names = self._naming.names()
        return {
            names.get(id(parameter), f"group {number} parameter {position}"): parameter
            for number, group in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
        }

    def _state_of(self, optimizer: Optimizer) -> dict[str, TensorFacts]:
        named = self._parameters_of(optimizer)
        found: dict[str, Tensor] = {}
        for name, parameter in named.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{key} of {name}"] = value
        return _facts(found)

    def _ordinal(self, optimizer: Optimizer) -> int:
        for number, known in enumerate(self._optimizers):
            if known is optimizer:
                return number
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1


class _Listener(events.Observer):
    """Keeps the indices that Hora's loader hands out."""

    def __init__(self, samples: list[int]):
        self._samples = samples

    def on_samples(self, *, epoch: int, step: int, micro_step: int, indices: Sequence[int]) -> None:  # noqa: ARG002
        """See `Observer`."""
        self._samples.extend(int(index) for index in indices)


def _place() -> tuple[int, int]:
    """Rank and world size: torch.distributed's, else Hora's or the launcher's."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        topology = Topology.from_env()
    except ConfigError:  # variables of a launcher that the script does not use
        return 0, 1
    return topology.rank, topology.world_size


def _exact() -> bool:
    session = sys.modules.get("hora.comm.session")
    return bool(session is not None and session.is_initialized() and session.session().exact is not None)


def _facts(tensors: Mapping[str, Tensor]) -> dict[str, TensorFacts]:
    return {name: facts_of(tensor) for name, tensor in tensors.items() if is_plain(tensor)}


def facts_of(tensor: Tensor) -> TensorFacts:
    """Digest and sketch of a tensor."""
    values = (tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()).cpu().contiguous()
    content = values.reshape(-1).view(torch.uint8).numpy().data if values.numel() else memoryview(b"")
    digest = blake2b(content, digest_size=16).hexdigest()
    return TensorFacts(tuple(values.shape), str(values.dtype).removeprefix("torch."), digest, sketch(values))


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a parameter group that JSON can hold."""
    return {name: plain for name, value in group.items() if name != "params" and (plain := _plain(value)) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Iterable):
        items = [_plain(item) for item in value]
        return items if None not in items else None
    return None
