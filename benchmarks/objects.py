"""Large objects: how long each call takes, and by how much a rank grows beyond what the result itself needs.

    hora run -np 4 benchmarks/objects.py --json benchmarks/results/objects.json [--size-mib 1024] [--calls gather,broadcast]
    hora run -np 4 --shared-dir /dev/shm benchmarks/objects.py --json benchmarks/results/objects-shared.json

With 1 GiB from each of 4 ranks `all_gather` needs 20 GiB of memory on one machine: 4 objects, and 4 copies on each rank.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hora
from hora.diag.bench.registry import Measurement, Workload
from hora.diag.bench.rows import rows, write_rows

MIB = 2**20


def status_mib(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and MiB by which this process grows at most."""
    hora.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begun = status_mib("VmRSS"), time.perf_counter()
    act()
    return time.perf_counter() - begun, status_mib("VmHWM") - before


def calls(obj: torch.Tensor, rank: int, world_size: int) -> dict[str, tuple[Callable[[], object], int]]:
    """What is called, and how many objects this rank has afterwards."""
    parts = [obj] * world_size if rank == 0 else None
    return {
        "broadcast": (lambda: hora.broadcast_object(obj), 1),
        "scatter": (lambda: hora.scatter_object(parts), 1),
        "gather": (lambda: hora.gather_object(obj), world_size if rank == 0 else 0),
        "all_gather": (lambda: hora.all_gather_object(obj), world_size),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--calls", default="broadcast,scatter,gather,all_gather")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    hora.init()
    rank, world_size = hora.rank(), hora.world_size()
    obj = torch.ones(args.size_mib * MIB, dtype=torch.uint8)
    hora.all_gather_object(torch.ones(2 * MIB, dtype=torch.uint8))  # opens what is opened once
    measurements = []
    for name in args.calls.split(","):
        act, num_objects = calls(obj, rank, world_size)[name]
        took_s, grown_mib = measure(act)
        told = hora.all_gather_object((took_s, grown_mib - num_objects * args.size_mib))
        for variant, unit, value in (
            ("time of the slowest rank", "s", max(took_s for took_s, _ in told)),
            ("beyond the result on the largest rank", "MiB", max(grown_mib for _, grown_mib in told)),
        ):
            workload = Workload(f"objects.{name} {args.size_mib} MiB", "one call", unit, world_size)
            measurements.append(Measurement(workload, variant, (value,)))
    if rank == 0:
        for measurement in measurements:
            unit = measurement.workload.unit
            print(f"{measurement.workload.name:28} {measurement.variant:40} {measurement.median:9.2f} {unit}  (ranks: {world_size})")
        if args.json:
            write_rows(args.json, rows(measurements, [f"hora run -np {world_size}", *sys.argv]))
    hora.shutdown()


if __name__ == "__main__":
    main()
