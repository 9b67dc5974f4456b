"""A step of DistributedDataParallel, unmodified, over shared memory beside Gloo: a ResNet-18 for small images on CPUs.

    hora run -np 8 benchmarks/ddp_backends.py --json benchmarks/results/ddp-backends.json [--rounds 5] [--steps 4]

Both variants run in turns in the same run; the parameters are compared after the first round, before rounding has grown.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hora
from hora.diag.bench.registry import Measurement, Workload
from hora.diag.bench.rows import rows, write_rows


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width_in: int, width: int, stride: int):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        plain = stride == 1 and width_in == width
        self.around = nn.Identity() if plain else nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.around(x))


def resnet18() -> nn.Module:
    """ResNet-18 (He et al., 2015) with a first layer for images of 32 x 32: 11.2 million parameters."""
    torch.manual_seed(0)
    widths = [64, 64, 128, 256, 512]
    blocks = [
        Block(widths[stage] if index == 0 else widths[stage + 1], widths[stage + 1], 2 if stage and index == 0 else 1)
        for stage in range(4)
        for index in range(2)
    ]
    first = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Variant:
    """A model of its own on a backend."""

    def __init__(self, backend: str, images: Tensor, labels: Tensor):
        self.model = DistributedDataParallel(resnet18(), process_group=dist.new_group(backend=backend))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.images, self.labels = images, labels

    def milliseconds(self, steps: int) -> float:
        """Of a step, the mean of `steps`."""
        hora.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.images), self.labels).backward()
            self.optimizer.step()
        hora.barrier()
        return (time.perf_counter() - begin) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="images a rank")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hora.init(device="cpu")
    hora.register_backends()
    torch.manual_seed(hora.rank())
    images, labels = torch.randn(options.batch, 3, 32, 32), torch.randint(10, (options.batch,))
    variants = {backend: Variant(backend, images, labels) for backend in ("gloo", "shm")}
    samples: dict[str, list[float]] = {backend: [] for backend in variants}
    for number in range(-1, options.rounds):
        for backend, variant in variants.items():
            elapsed_ms = variant.milliseconds(options.steps)
            if number >= 0:
                samples[backend].append(elapsed_ms)
        if number < 0:
            gloo, shm = (list(variant.model.parameters()) for variant in variants.values())
            for ours, theirs in zip(shm, gloo, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-2)
    if hora.rank() == 0:
        workload = Workload("ddp.resnet18", "one step on CPUs", "ms", hora.world_size())
        measurements = [Measurement(workload, backend, tuple(times)) for backend, times in samples.items()]
        for measurement in measurements:
            print(f"{workload.name} {measurement.variant:5} {measurement.median:9.2f} ms  (ranks: {hora.world_size()})")
        if options.json:
            write_rows(options.json, rows(measurements, ["hora", "run", "-np", str(hora.world_size()), *sys.argv]))
    for variant in variants.values():
        del variant.model
    hora.shutdown()


if __name__ == "__main__":
    main()
