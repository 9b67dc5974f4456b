"""The ways to make one update: each gives a function that makes one, on a model of its own."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hora
from hora.diag.steps.request import STRATEGIES, how_compiled, is_captured
from hora.diag.steps.workloads import Batch, Job

_WARM_UP = 12
"""Steps before a capture: DistributedDataParallel rebuilds its buckets in them, optimizers make their state."""

_FUSED_BYTES = 64 * 2**20

_BUCKETS_MIB = (25, 100)
"""Sizes of buckets of which DistributedDataParallel at its best has the faster one."""
_STEPS_TO_CHOOSE = 10


@dataclass
class Variant:
    """One way.

    Attributes:
        step: makes an update.
        model: whose parameters it updates.
        optimizer: whose state it uses.
        eager_because: why a step that should be captured is not.
        graph: of a step captured here, which must be gone before NCCL ends.
        kept: what the step works on besides.
        bucket_mib: of DistributedDataParallel at its best, where sizes were tried.
    """

    step: Callable[[], object]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    eager_because: str | None = None
    graph: torch.cuda.CUDAGraph | None = None
    kept: Sequence[Any] = ()
    bucket_mib: int | None = None

    @property
    def shared_bytes(self) -> int:
        """Memory that GPUs share, which torch's allocator does not count."""
        return self.optimizer.synchronizer.shared_bytes if isinstance(self.optimizer, hora.DistributedOptimizer) else 0

    def release(self) -> None:
        """Gives the graph back."""
        if self.graph is not None:
            self.graph.reset()


def make(name: str, job: Job) -> Variant:
    """The variant `name` (`request.VARIANTS`) of `job`. Collective, but for "single"."""
    if name != "ddp" and name.startswith("ddp") and hora.device().type == "cuda":
        return _fastest([partial(_make, name, job, bucket_mib) for bucket_mib in _BUCKETS_MIB])
    return _make(name, job)


def _fastest(makers: Sequence[Callable[[], Variant]]) -> Variant:
    """Of several forms of one variant the fastest, the same on all ranks. Collective. One is there at a time, for the sake of memory."""
    times: list[float] = []
    for index, maker in enumerate(makers):
        way = maker()
        for _ in range(_STEPS_TO_CHOOSE):
            way.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_STEPS_TO_CHOOSE):
            way.step()
        torch.cuda.synchronize()
        times.append(max(hora.all_gather_object(time.perf_counter() - begin)))
        if index + 1 == len(makers) and times[-1] == min(times):
            return way
        way.release()
        del way
        gc.collect()
    return makers[times.index(min(times))]()


def _make(name: str, job: Job, bucket_mib: int | None = None) -> Variant:
    device = hora.device()
    model, batch = model_of(job), job.batch_of(hora.rank(), device)
    if name == "fsdp2":
        _deal_out(model, job)
    optimizer = job.optimizer(model.parameters())
    if name.startswith("train-step"):
        return _train_step(name, job, model, optimizer, batch)
    if name in STRATEGIES:
        return _distributed(hora.DistributedOptimizer(optimizer, model, strategy=name), job, model, batch)
    if is_captured(name):
        return _captured(name.removesuffix("-captured"), job, model, optimizer, batch, bucket_mib)
    if name in ("single", "ddp-best") and device.type == "cuda":
        _fuse(optimizer)
    module = as_ddp(model, best=name == "ddp-best", bucket_mib=bucket_mib) if name.startswith("ddp") else model
    sums: dict[str, Callable[[], None]] = {"per-parameter": lambda: _sum_each(model), "fused": lambda: _sum_fused(model)}
    return Variant(_plain(job, module, optimizer, batch, sums.get(name, _nothing)), model, optimizer, bucket_mib=bucket_mib)


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """As whoever wants the fastest step asks for; `DistributedOptimizer` does so by itself."""
    for group in optimizer.param_groups:
        group["fused"] = True


def model_of(job: Job) -> nn.Module:
    """The model as all variants begin with it."""
    torch.manual_seed(0)
    return job.model().to(hora.device())


def _plain(job: Job, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, after: Callable[[], None]) -> Callable[[], None]:
    weight = job.weight(batch)

    def step() -> None:
        optimizer.zero_grad()
        (job.loss_sum(module, batch) / weight).backward()
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


def _sum_fused(model: nn.Module) -> None:
    for parameters in _filled(list(model.parameters())):
        buffer = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
        dist.all_reduce(buffer)
        buffer /= hora.world_size()
        for parameter, part in zip(parameters, buffer.split([parameter.numel() for parameter in parameters]), strict=True):
            parameter.grad = part.view(parameter.shape)


def _filled(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """As many at a time as a buffer holds, the last one that was made first, as backward has them."""
    group: list[nn.Parameter] = []
    for parameter in reversed(parameters):
        if group and sum(member.nbytes for member in group) + parameter.nbytes > _FUSED_BYTES:
            yield group
            group = []
        group.append(parameter)
    yield group


def as_ddp(model: nn.Module, *, best: bool, bucket_mib: int | None = None) -> DistributedDataParallel:
    """`model` under DistributedDataParallel, with the flags that make it fastest if wanted. Collective."""
    flags: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True} if best else {}
    if bucket_mib is not None:
        flags["bucket_cap_mb"] = bucket_mib
    return DistributedDataParallel(model, device_ids=[hora.device()] if hora.device().type == "cuda" else None, **flags)


def _deal_out(model: nn.Module, job: Job) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(hora.device().type, (hora.world_size(),))
    to: Any = model.to  # torch's annotations leave out memory_format
    to(memory_format=torch.contiguous_format)  # FSDP2 takes no other
    for module in [part for part in model.modules() if isinstance(part, job.units)]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _distributed(optimizer: hora.DistributedOptimizer, job: Job, model: nn.Module, batch: Batch) -> Variant:
    weight = job.weight(batch)

    def step() -> None:
        for micro_batch in optimizer.micro_batches([batch]):
            optimizer.backward(job.loss_sum(model, micro_batch), weight=weight)
        optimizer.step()

    return Variant(step, model, optimizer)


def _train_step(name: str, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Variant:
    weight = job.weight(batch)

    def loss_fn(module: nn.Module, micro_batch: Batch, state: None) -> tuple[Tensor, int, dict[str, Tensor], None]:
        return job.loss_sum(module, micro_batch), weight, {}, state

    strategy = "sharded" if "-sharded" in name else "overlap"
    distributed = hora.DistributedOptimizer(optimizer, model, strategy=strategy)
    train_step = hora.TrainStep(model, loss_fn, distributed, compile=how_compiled(name))
    for _ in range(_WARM_UP):
        train_step([batch])
    because = None if train_step.num_replayed else train_step.eager_because or "it has not been captured yet"
    return Variant(lambda: train_step([batch]), model, distributed, because)


def _captured(name: str, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, bucket_mib: int | None) -> Variant:
    """A whole step of DistributedDataParallel, or of one process alone, in a graph, as PyTorch's notes describe it."""
    _fuse(optimizer)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    if name.endswith("-compiled"):
        model.compile()
    is_ddp, weight = name.startswith("ddp"), job.weight(batch)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        module = as_ddp(model, best=True, bucket_mib=bucket_mib) if is_ddp else model

        def step() -> None:
            optimizer.zero_grad(set_to_none=not is_ddp)
            (job.loss_sum(module, batch) / weight).backward()
            optimizer.step()

        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return Variant(graph.replay, model, optimizer, None, graph, [module, step], bucket_mib)
