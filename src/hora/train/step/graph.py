"""A step as a CUDA graph: captured once from what an eager step does, and replayed with the batches to come."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hora.comm.session import session
from hora.sync.beside import Beside
from hora.sync.captured import CapturedChecks
from hora.train.step.dealt import Batches, like_step, logical_ranks_of
from hora.train.step.forward import Forward, StepSums
from hora.train.step.rates import LearningRates
from hora.train.step.tree import map_tensors, signature, tensors_of


@dataclass
class CapturedStep:
    """The graph of steps of one signature.

    Attributes:
        graph: forward, backward, sums, update, and the state for the next step.
        inputs: what it reads the micro-batches from.
        states: what it reads the states from, and, if they stay alike, leaves the new ones in.
        states_after: the new states, which are `states` themselves if they stay alike.
        totals: what it leaves of loss, weight and metrics.
        own_weight: of this rank's samples.
        grad_norm: of the gradient before it was clipped; None where nothing clips.
        prepare: what must be called with a step before its replay.
        reads: tensors that the graph reads and writes beside these, which must live as long.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    states: list[Tensor]
    states_after: list[Any]
    totals: Tensor
    own_weight: float | Tensor
    grad_norm: Tensor | None
    prepare: Callable[[Any], None]
    reads: list[Tensor]

    @torch.no_grad()
    def replay(self, micro_batches: Batches, states: Sequence[Any]) -> tuple[Tensor, list[Any], float | Tensor]:
        """Carries the step out; returns its totals, the states after it, and this rank's weight, all on the device."""
        _load(self.inputs, micro_batches)
        _load(self.states, states)
        self.prepare(micro_batches)
        self.graph.replay()
        weight = self.own_weight.clone() if isinstance(self.own_weight, Tensor) else self.own_weight
        mine = {id(state) for state in self.states}
        return self.totals.clone(), map_tensors(lambda state: state if id(state) in mine else state.clone(), self.states_after), weight


def capture(
    forward: Forward,
    micro_batches: Batches,
    states_before: Sequence[Any],
    rates: LearningRates,
    checks: CapturedChecks,
    stream: torch.cuda.Stream,
    pool: Any,
) -> CapturedStep:
    """Captures a step like those that ran on `stream` before; nothing is carried out.

    Collective: all ranks capture or replay this step, or none.

    Raises:
        Exception: something in it cannot be captured; the state of the optimizer and of the gradients is as before.
    """
    static_batches = like_step(micro_batches, map_tensors(lambda tensor: tensor.to(session().device, copy=True), list(micro_batches)))
    static_states = map_tensors(torch.clone, list(states_before))
    sums = StepSums(forward, logical_ranks_of(static_batches), Beside(torch.cuda.Stream()))
    graph = torch.cuda.CUDAGraph()
    optimizer = forward.optimizer
    torch.cuda.synchronize()
    checks.prepare(len(static_batches))
    current = torch.cuda.current_stream()
    try:
        with (
            nothing_collected(),
            rates.lent(to_capture=True),
            optimizer.synchronizer.capturing(sums, checks, graph, len(static_batches)) as prepare,
            # Other threads, such as one that pins batches, may go on as they like.
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            after = forward.run(static_batches, static_states, sums, num_early=len(static_batches))
            optimizer.update_captured(checks)
            if signature(after) == signature(static_states):
                carry_states(tensors_of(static_states), tensors_of(after))
                after = static_states
            totals = sums.total()
    except BaseException:
        torch.cuda.set_stream(current)  # which a capture that fails does not put back
        _end_capture(stream)
        raise
    norm = None if optimizer.clip_norm is None else optimizer.last_grad_norm
    batches, states = tensors_of(list(static_batches)), tensors_of(static_states)
    return CapturedStep(graph, batches, states, after, totals, sums.own_weight, norm, prepare, forward.lasting_tensors())


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Inside the `with` block Python collects no garbage.

    To free memory that other GPUs map (of an optimizer that is gone) torch waits for the device; while a graph is captured that is an error, with
    which it ends the process.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _end_capture(stream: torch.cuda.Stream) -> None:
    """A capture that fails leaves torch's generator as if it went on, and no random number could be drawn any more: one that succeeds ends that."""
    graph = torch.cuda.CUDAGraph()
    with nothing_collected(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        torch.zeros((), device=session().device)
    graph.reset()


@torch.no_grad()
def carry_states(olds: Sequence[Tensor], news: Sequence[Tensor]) -> None:
    """Puts the new states in the place of the old ones; a new one may be an old one of another place."""
    memory = {old.untyped_storage().data_ptr() for old in olds}
    values = [new.clone() if new.untyped_storage().data_ptr() in memory else new for new in news]
    for old, value in zip(olds, values, strict=True):
        old.copy_(value)


def _load(places: Sequence[Tensor], values: Any) -> None:
    """Puts the tensors of `values` where the graph reads them."""
    for place, value in zip(places, tensors_of(list(values)), strict=True):
        if value is not place:
            place.copy_(value, non_blocking=True)
