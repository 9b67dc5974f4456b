"""The kernels of one captured step on GPUs, in the order of time: what runs behind backward, and how much of the sums is hidden.

    hora run -np 2 benchmarks/kernels.py --workload gpt2_1 --variants ddp-compiled-captured,train-step-compiled --dir kernels

writes a text file for each variant of `hora bench step` that is asked for, from rank 0. The profiler makes a step some percent longer.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import hora
from hora.diag.steps import variants, workloads
from hora.train.files import replace_file

STEPS = 4
TRIES = 3
LEAST_US = 4.0
_SAYS_NOTHING = re.compile(
    r"^void |at::native::|\(anonymous namespace\)::|TensorListMetadata<\d+>, |FusedOptimizerTensorListMetadata<\d+>, "
)


class Kernel(NamedTuple):
    """When it ran, in microseconds from the beginning of the step, and on which stream."""

    begin: float
    end: float
    stream: int
    name: str

    @property
    def sums(self) -> bool:
        """Whether it moves gradients to other GPUs."""
        return self.name.startswith(("nccl", "one_shot", "two_shot"))


def main() -> None:
    """Profiles the variants one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--variants", required=True)
    parser.add_argument("--dir", type=Path, required=True)
    asked = parser.parse_args()
    hora.init()
    job = workloads.make(asked.workload, tiny=False)
    for name in asked.variants.split(","):
        way = variants.make(name, job)
        try:
            kernels = kernels_of(way)
        finally:
            way.release()
        if hora.rank() == 0:
            asked.dir.mkdir(parents=True, exist_ok=True)
            replace_file(asked.dir / f"{asked.workload}-{name}.txt", describe(name, kernels).encode())
            print(describe(name, kernels).split("\n\n", maxsplit=1)[0])
    hora.shutdown()


def kernels_of(way: variants.Variant) -> list[Kernel]:
    """Those of the last of some steps."""
    for _ in range(STEPS):
        way.step()
    for _ in range(TRIES):
        hora.barrier()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(STEPS):
                way.step()
            torch.cuda.synchronize()
        events = [event for event in profiled.events() or () if event.device_type is DeviceType.CUDA]
        if all(hora.all_gather_object(bool(events))):
            break
    else:
        sys.exit(f"the profiler saw no kernel in {TRIES} trials")
    events.sort(key=lambda event: event.time_range.start)
    last = events[-(len(events) // STEPS) :]
    begin = last[0].time_range.start
    return [Kernel(event.time_range.start - begin, event.time_range.end - begin, event.device_resource_id, event.name) for event in last]


def describe(name: str, kernels: Sequence[Kernel]) -> str:
    """A summary, and behind an empty line the kernels."""
    sums, others = merged([kernel for kernel in kernels if kernel.sums]), merged([kernel for kernel in kernels if not kernel.sums])
    hidden = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in sums for since, until in others)
    summing = sum(end - begin for begin, end in sums)
    lines = [
        f"{name}: {hora.world_size()} x {torch.cuda.get_device_name()}, one step of {max(kernel.end for kernel in kernels) / 1e3:.3f} ms, "
        f"{len(kernels)} kernels; sums travel for {summing:.0f} us, {hidden:.0f} of them beside other kernels",
        "",
        f"begin us    end us  stream  kernel (of {LEAST_US:g} us at least)",
    ]
    lines += [
        f"{kernel.begin:8.1f}  {kernel.end:8.1f}  {kernel.stream:6d}  {_SAYS_NOTHING.sub('', kernel.name)[:100]}"
        for kernel in kernels
        if kernel.end - kernel.begin >= LEAST_US or kernel.sums
    ]
    return "\n".join(lines) + "\n"


def merged(kernels: Sequence[Kernel]) -> list[tuple[float, float]]:
    """The time in which at least one of them runs."""
    spans: list[tuple[float, float]] = []
    for kernel in kernels:
        if spans and kernel.begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], kernel.end)
        else:
            spans.append((kernel.begin, kernel.end))
    return spans


if __name__ == "__main__":
    main()
