"""One training step under DistributedDataParallel and under Hora's strategies, in the same run, in turns.

    hora run -np 2 benchmarks/step.py --json benchmarks/results/step.json [--workload lstm-small] [--rounds 9] [--steps 30]

Prints a table and writes a row for each variant; the value is the median over the rounds of the mean time of a step, in milliseconds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Job:
    """A model and the batch of one rank; the batch per rank is the same whatever the number of ranks."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]
    classes: int


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
}


def stepper(job: Job, variant: str) -> Callable[[], None]:
    """One update under `variant`."""
    torch.manual_seed(0)
    device = hora.device()
    model, inputs, targets = job.model().to(device), job.inputs().to(device), job.targets().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    count = targets.numel()

    def loss_sum(module: nn.Module) -> Tensor:
        return F.cross_entropy(module(inputs).view(-1, job.classes), targets.view(-1), reduction="sum")

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
            print(f"{measurement.workload.name:18} {measurement.variant:10} {measurement.median:8.3f} ms  (ranks: {hora.world_size()})")
        if options.json:
            write_rows(options.json, rows(measurements, [f"hora run -np {hora.world_size()}", *sys.argv]))
    hora.shutdown()


if __name__ == "__main__":
    main()
