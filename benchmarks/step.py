"""One training step under DistributedDataParallel and under Hora's strategies, in the same run, in turns.

    hora run -np 2 benchmarks/step.py --json benchmarks/results/step.json [--workload lstm-small] [--rounds 9] [--steps 30]

Prints a table and writes a row for each variant; the value is the median over the rounds of the mean time of a step, in milliseconds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import exact
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hora
from hora.diag.bench.registry import Workload
from hora.diag.bench.rows import rows, write_rows


class LanguageModel(nn.Module):
    """Embedding, LSTM, projection, as in seed sizes of the PTB model."""

    def __init__(self, width: int, words: int = 10_000):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2)
        self.out = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.lstm(self.table(words))[0])


_SGD = partial(torch.optim.SGD, lr=0.1)


@dataclass(frozen=True)
class Job:
    """A model and the batch of one rank; the batch per rank is the same whatever the number of ranks."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]
    classes: int
    optimizer: Callable[..., torch.optim.Optimizer] = _SGD
    bfloat16: bool = False


def gpt2(samples: int) -> Job:
    """GPT-2 124M on `samples` rows of 1024 tokens a rank."""
    tokens = partial(torch.randint, 50_257, (samples, 1024))
    return Job(lambda: exact.Gpt(1024, 768, 12, 12), tokens, tokens, 50_257, partial(torch.optim.AdamW, lr=1e-4), bfloat16=True)


JOBS = {
    "lstm-small": Job(lambda: LanguageModel(200), lambda: torch.randint(10_000, (20, 20)), lambda: torch.randint(10_000, (20, 20)), 10_000),
    "lstm-medium": Job(
        lambda: LanguageModel(650), lambda: torch.randint(10_000, (35, 20)), lambda: torch.randint(10_000, (35, 20)), 10_000
    ),
    "mlp": Job(
        lambda: nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())), nn.Linear(1024, 1000)),
        lambda: torch.randn(64, 1024),
        lambda: torch.randint(1000, (64,)),
        1000,
    ),
    "gpt2-1x1024": gpt2(1),
    "gpt2-8x1024": gpt2(8),
}


GRAPHS: list[torch.cuda.CUDAGraph] = []
"""Those made here, which must be gone before NCCL ends."""


def stepper(job: Job, variant: str) -> Callable[[], None]:
    """One update under `variant`."""
    torch.manual_seed(0)
    device = hora.device()
    model, inputs, targets = job.model().to(device), job.inputs().to(device), job.targets().to(device)
    optimizer: torch.optim.Optimizer = job.optimizer(model.parameters())
    count = targets.numel()

    def loss_sum(module: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=job.bfloat16):
            return F.cross_entropy(module(inputs).view(-1, job.classes).float(), targets.view(-1), reduction="sum")

    if variant.endswith("-captured"):
        return captured_stepper(job, variant.removesuffix("-captured"), model, optimizer, loss_sum, count)
    if variant in ("ddp", "ddp-best"):
        best = {"gradient_as_bucket_view": True, "static_graph": True} if variant == "ddp-best" else {}
        ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **best)

        def step() -> None:
            optimizer.zero_grad()
            (loss_sum(ddp) / count).backward()
            optimizer.step()
    elif variant == "single":

        def step() -> None:
            optimizer.zero_grad()
            (loss_sum(model) / count).backward()
            optimizer.step()
    else:
        distributed = hora.DistributedOptimizer(optimizer, model, strategy=variant)

        def step() -> None:
            for _ in distributed.micro_batches([None]):
                distributed.backward(loss_sum(model), weight=count)
            distributed.step()

    return step


def captured_stepper(
    job: Job, variant: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss_sum: Callable[[nn.Module], Tensor], count: int
) -> Callable[[], object]:
    """One update as a CUDA graph: by `hora.TrainStep`, of DistributedDataParallel, or of one GPU alone; "-compiled": with torch.compile."""
    kind, compiled = variant.removesuffix("-compiled"), variant.endswith("-compiled")
    if kind == "hora":

        def loss_fn(module: nn.Module, batch: Tensor, state: None) -> tuple[Tensor, int, dict[str, Tensor], None]:
            with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=job.bfloat16):
                outputs = module(batch[0]).view(-1, job.classes)
            return F.cross_entropy(outputs.float(), batch[1].view(-1), reduction="sum"), batch[1].numel(), {}, state

        train_step = hora.TrainStep(model, loss_fn, optimizer, compile=compiled)
        batch = job.inputs().to(hora.device()), job.targets().to(hora.device())
        for _ in range(8):
            train_step([batch])
        assert train_step.num_replayed, train_step.eager_because
        return lambda: train_step([batch])
    for group in optimizer.param_groups:
        group["fused"] = True
        if "capturable" in group:
            group["capturable"] = True
    if compiled:
        model.compile()
    stream = torch.cuda.Stream()
    module: nn.Module = model
    with torch.cuda.stream(stream):
        if kind == "ddp":
            module = DistributedDataParallel(model, device_ids=[hora.device()], gradient_as_bucket_view=True, static_graph=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=kind != "ddp")
            (loss_sum(module) / count).backward()
            optimizer.step()

        for _ in range(12):  # DistributedDataParallel rebuilds its buckets first
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    GRAPHS.append(graph)

    def replay(_kept: object = (module, optimizer, step)) -> None:
        graph.replay()

    return replay


def timed(step: Callable[[], None], steps: int) -> float:
    """Mean time of a step in milliseconds, the ranks beginning together."""
    hora.barrier()
    if hora.device().type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if hora.device().type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(JOBS), action="append")
    parser.add_argument("--variants", nargs="+", default=["ddp", "ddp-best", "deferred", "overlap", "single"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hora.init()
    measurements = []
    for name in options.workload or sorted(JOBS):
        workload = Workload(f"step.{name}", "one update", "ms", hora.world_size())
        for variant in options.variants:
            step = stepper(JOBS[name], variant)
            workload.variant(variant)(lambda step=step: timed(step, options.steps))
        measurements += workload.measure(options.rounds)
    if hora.rank() == 0:
        for measurement in measurements:
            print(f"{measurement.workload.name:18} {measurement.variant:24} {measurement.median:8.3f} ms  (ranks: {hora.world_size()})")
        if options.json:
            write_rows(options.json, rows(measurements, [f"hora run -np {hora.world_size()}", *sys.argv]))
    for graph in GRAPHS:
        graph.reset()
    hora.shutdown()


if __name__ == "__main__":
    main()
