"""The ways to make one update: each gives a function that makes one, on a model of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hora
from hora.diag.steps.workloads import Job

_WARM_UP = 12
"""Steps before a capture: DistributedDataParallel rebuilds its buckets in them, optimizers make their state."""


@dataclass
class Variant:
    """One way.

    Attributes:
        step: makes an update.
        eager_because: why a step that should be captured is not.
        graph: of a step captured here, which must be gone before NCCL ends.
        kept: what the step works on.
    """

    step: Callable[[], object]
    eager_because: str | None = None
    graph: torch.cuda.CUDAGraph | None = None
    kept: list[Any] = field(default_factory=list)

    def release(self) -> None:
        """Gives the graph back."""
        if self.graph is not None:
            self.graph.reset()


def make(name: str, job: Job) -> Variant:
    """The variant `name` (`request.VARIANTS`) of `job`. Collective, but for "single"."""
    torch.manual_seed(0)
    device = hora.device()
    model, batch = job.model().to(device), (job.inputs().to(device), job.targets().to(device))
    optimizer = job.optimizer(model.parameters())
    if name.startswith("train-step"):
        return _train_step(name, job, model, optimizer, batch)
    if name in ("deferred", "overlap", "sharded"):
        return _distributed(hora.DistributedOptimizer(optimizer, model, strategy=name), job, model, batch)
    if name.endswith("-captured"):
        return _captured(name.removesuffix("-captured"), job, model, optimizer, batch)
    module: nn.Module = model
    if name.startswith("ddp"):
        module = _ddp(model, best=name == "ddp-best")
    after: Callable[[], None] = (lambda: _sum_each(model)) if name == "per-parameter" else _nothing
    return Variant(_plain(job, module, optimizer, batch, after))


def _plain(
    job: Job, module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], after: Callable[[], None]
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        (job.loss_sum(module, *batch) / batch[1].numel()).backward()
        after()
        optimizer.step()

    return step


def _nothing() -> None:
    """Nothing travels after backward."""


def _sum_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= hora.world_size()


def _ddp(model: nn.Module, *, best: bool) -> nn.Module:
    flags: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True} if best else {}
    return DistributedDataParallel(model, device_ids=[hora.device()] if hora.device().type == "cuda" else None, **flags)


def _distributed(optimizer: hora.DistributedOptimizer, job: Job, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Variant:
    def step() -> None:
        for inputs, targets in optimizer.micro_batches([batch]):
            optimizer.backward(job.loss_sum(model, inputs, targets), weight=targets.numel())
        optimizer.step()

    return Variant(step)


def _train_step(name: str, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Variant:
    def loss_fn(module: nn.Module, micro_batch: tuple[Tensor, Tensor], state: None) -> tuple[Tensor, int, dict[str, Tensor], None]:
        return job.loss_sum(module, *micro_batch), micro_batch[1].numel(), {}, state

    strategy = "sharded" if name.endswith("-sharded") else "overlap"
    distributed = hora.DistributedOptimizer(optimizer, model, strategy=strategy)
    train_step = hora.TrainStep(model, loss_fn, distributed, compile=name.endswith("-compiled"))
    for _ in range(_WARM_UP):
        train_step([batch])
    because = None if train_step.num_replayed else train_step.eager_because or "it has not been captured yet"
    return Variant(lambda: train_step([batch]), because)


def _captured(name: str, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Variant:
    """A whole step of DistributedDataParallel, or of one process alone, in a graph, as PyTorch's notes describe it."""
    for group in optimizer.param_groups:
        group["fused"] = True
        if "capturable" in group:
            group["capturable"] = True
    if name.endswith("-compiled"):
        model.compile()
    is_ddp = name.startswith("ddp")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        module = _ddp(model, best=True) if is_ddp else model

        def step() -> None:
            optimizer.zero_grad(set_to_none=not is_ddp)
            (job.loss_sum(module, *batch) / batch[1].numel()).backward()
            optimizer.step()

        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return Variant(graph.replay, None, graph, [module, optimizer, step])
