"""A rank of the bench: `python -m hora.diag.steps REQUEST RESULTS`, under `hora run`. Rank 0 writes a line for each workload to the file RESULTS."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hora
from hora.diag.bench.registry import Workload
from hora.diag.steps import variants, workloads
from hora.diag.steps.numbers import Expected, tolerance
from hora.diag.steps.request import Request


def main(request_text: str, results: Path) -> None:
    """Measures what the first argument says."""
    request = Request.parse(request_text)
    here = hora.init(device=None if request.on_gpus else "cpu")
    if not request.on_gpus:
        torch.set_num_threads(1)
    for name in request.workloads:
        point = measure(name, request)
        if here.rank == 0:
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(point) + "\n")
    hora.shutdown()


def measure(name: str, request: Request) -> dict[str, object]:
    """All variants of a workload, in turns: milliseconds a step, the most memory that one needs, why it is not captured, and how wrong it is."""
    job = workloads.make(name, tiny=request.tiny)
    made = {variant: variants.make(variant, job) for variant in request.variants}
    workload = Workload(f"step.{name}", "one update", "ms", request.ranks)
    for variant, way in made.items():
        workload.variant(variant)(_sampler(way.step, request.steps))
    samples = {measured.variant: list(measured.samples) for measured in workload.measure(request.rounds)}
    peaks = {variant: _peak_mb(way.step) for variant, way in made.items()}
    expected = Expected(job)
    differences = {variant: expected.difference(variant, way) for variant, way in made.items()}
    for way in made.values():
        way.release()
    return {
        "workload": name,
        "items": job.items,
        "num_items": job.weight(job.batch_of(hora.rank(), torch.device("cpu"))),
        "tolerance": tolerance(job),
        "samples": samples,
        "differences": differences,
        "peak_mb": peaks,
        "eager_because": {variant: way.eager_because for variant, way in made.items() if way.eager_because is not None},
    }


def _sampler(step: Callable[[], object], steps: int) -> Callable[[], float]:
    """Mean time of a step in milliseconds, the ranks beginning together."""

    def sample() -> float:
        hora.barrier()
        _synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        _synchronize()
        return (time.perf_counter() - begin) / steps * 1e3

    return sample


def _peak_mb(step: Callable[[], object]) -> float | None:
    """What a step needs beside what lies there between steps, on a GPU; what a graph needs it keeps, and is not seen here."""
    if hora.device().type != "cuda":
        return None
    _synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    _synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _synchronize() -> None:
    if hora.device().type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
