"""What `hora.hvd` costs: many small sums, a large one, and steps beside DistributedDataParallel and strategy `overlap`, eager all: of a perceptron of
3.1 million parameters, and on GPUs of GPT-2 124M (8 x 1024 tokens a rank, AdamW, bfloat16).

    hora run -np 2 benchmarks/hvd.py --json benchmarks/results/hvd.json [--rounds 15] [--tiny]

DistributedDataParallel sums over the backend of the session, on the CPUs of one host shm, and over Gloo. Variants take turns; each sample is one
call, or the mean of ten steps.
"""

import argparse
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hora
import hora.hvd as hvd
from hora.diag.bench.registry import Measurement, Workload
from hora.diag.bench.rows import rows, write_rows
from hora.diag.steps import variants as ways
from hora.diag.steps import workloads

_STEPS = 10


def small_sums(device: torch.device) -> Callable[[], object]:
    tensors = [torch.randn(1000, device=device) for _ in range(300)]

    def act() -> None:
        handles = [hvd.allreduce_async_(tensor, name=f"small {number}", op=hvd.Average) for number, tensor in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    return act


def large_sum(device: torch.device) -> Callable[[], object]:
    tensor = torch.randn(25_000_000, device=device)
    return lambda: hvd.allreduce_(tensor, name="large", op=hvd.Average)


def perceptron(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    widths = [784, 1024, 1024, 1024, 128, 10]
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).to(device)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Callable[[], object]:
    inputs, targets = batch

    def act() -> None:
        for _ in range(_STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    return act


def under_hvd(device: torch.device, batch: tuple[Tensor, Tensor]) -> Callable[[], object]:
    model = perceptron(device)
    sgd = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return steps(model, hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters()), batch)


def under_ddp(device: torch.device, batch: tuple[Tensor, Tensor], group: dist.ProcessGroup | None) -> Callable[[], object]:
    model = nn.parallel.DistributedDataParallel(perceptron(device), process_group=group, gradient_as_bucket_view=True, static_graph=True)
    return steps(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), batch)


def gpt2(way: str, job: workloads.Job, device: torch.device) -> Callable[[], object]:
    if way != "hora.hvd":
        step = ways.make({"DistributedDataParallel": "ddp-best"}.get(way, way), job).step
    else:
        model, batch = ways.model_of(job), job.batch_of(hvd.rank(), device)
        optimizer = hvd.DistributedOptimizer(job.optimizer(model.parameters()), named_parameters=model.named_parameters())
        weight = job.weight(batch)

        def step() -> None:
            optimizer.zero_grad()
            (job.loss_sum(model, batch) / weight).backward()
            optimizer.step()

    def act() -> None:
        for _ in range(_STEPS):
            step()

    return act


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of GPT-2's, on CPUs too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    hvd.init()
    world_size, device = hvd.size(), hora.device()
    torch.manual_seed(1 + hvd.rank())
    batch = torch.randn(64, 784, device=device), torch.randint(10, (64,), device=device)
    variants = {
        ("hvd.300 sums of 1,000 floats", "hora.hvd", 1): small_sums(device),
        ("hvd.sum of 25,000,000 floats", "hora.hvd", 1): large_sum(device),
        ("hvd.step of a perceptron", "hora.hvd", _STEPS): under_hvd(device, batch),
        ("hvd.step of a perceptron", "DistributedDataParallel", _STEPS): under_ddp(device, batch, None),
    }
    if device.type == "cpu" and world_size > 1:
        gloo = dist.new_group(backend="gloo")
        variants["hvd.step of a perceptron", "DistributedDataParallel on Gloo", _STEPS] = under_ddp(device, batch, gloo)
    if device.type == "cuda" or args.tiny:
        job = workloads.make("gpt2_8", tiny=args.tiny)
        for way in ("hora.hvd", "DistributedDataParallel", "overlap"):
            variants["hvd.step of GPT-2 124M, 8 x 1024 tokens" + " (tiny)" * args.tiny, way, _STEPS] = gpt2(way, job, device)
    samples: dict[tuple[str, str, int], list[float]] = {variant: [] for variant in variants}
    for number in range(args.rounds + 2):
        for variant, act in variants.items():
            hvd.barrier()
            begun = time.perf_counter()
            act()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                samples[variant].append((time.perf_counter() - begun) * 1e3 / variant[2])
    measurements = [
        Measurement(Workload(name, "one call", "ms", world_size), variant, tuple(taken)) for (name, variant, _), taken in samples.items()
    ]
    if hvd.rank() == 0:
        for measurement in measurements:
            least, most = min(measurement.samples), max(measurement.samples)
            print(f"{measurement.workload.name:30} {measurement.variant:32} {measurement.median:8.2f} ms ({least:.2f} to {most:.2f})")
        if args.json:
            write_rows(args.json, rows(measurements, [f"hora run -np {world_size}", *sys.argv]))
    variants.clear()
    hvd.shutdown()


if __name__ == "__main__":
    main()
