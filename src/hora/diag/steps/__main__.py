"""A rank of the bench: `python -m hora.diag.steps REQUEST RESULTS`, under `hora run`. Rank 0 writes a line for each workload to the file RESULTS."""

import gc
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
from hora.diag.steps.request import Request, is_captured

_STEPS_TO_PEAK = 3
"""The first makes the state of the optimizer."""


def main(request_text: str, results: Path) -> None:
    """Measures what the first argument says."""
    request = Request.parse(request_text)
    here = hora.init(backend=request.backend, device=None if request.on_gpus else "cpu")
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
    peaks: dict[str, float | None] = {}
    made = {variant: _made(variant, job, peaks) for variant in request.variants}
    workload = Workload(f"step.{name}", "one update", "ms", request.ranks)
    for variant, way in made.items():
        workload.variant(variant)(_sampler(way.step, request.steps))
    samples = {measured.variant: list(measured.samples) for measured in workload.measure(request.rounds)}
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
        "bucket_mib": {variant: way.bucket_mib for variant, way in made.items()},
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


def _made(variant: str, job: workloads.Job, peaks: dict[str, float | None]) -> variants.Variant:
    """The variant; on a GPU its peak of memory goes into `peaks`: parameters, gradients, state of the optimizer, and what a step needs."""
    if hora.device().type != "cuda":
        peaks[variant] = None
        return variants.make(variant, job)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = variants.make(variant, job)
    if not is_captured(variant):
        torch.cuda.reset_peak_memory_stats()  # what was needed to make it, such as the whole model of fsdp2, is gone
        for _ in range(_STEPS_TO_PEAK):
            made.step()
    peaks[variant] = (torch.cuda.max_memory_allocated() - before + made.shared_bytes) / 2**20
    return made


def _synchronize() -> None:
    if hora.device().type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
