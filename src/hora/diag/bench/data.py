"""What it costs to shuffle a large data set, to jump to any place in its order, and to load a small one.

Shuffling is measured in a process of its own for each sample, so that the peak of its memory is its own: Hora's plan for 10^8 and 10^10 samples
beside torch's DistributedSampler for 10^8. Loading is measured here, over data sets that cost next to nothing, so that what is left is the
loader.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from hora.diag.bench.registry import Sample, Workload, register
from hora.errors import HoraError
from hora.plan.samples import SamplePlan

GLOBAL_BATCH_SIZE = 512
NUM_LOADED = 20_000

_TIMEOUT_S = 600.0

# Each text sets begin to when everything is imported, and leaves the global batch of `step` in `batch`.
_PLAN = """\
import sys, time
from hora.plan.samples import SamplePlan
num_samples, fraction = int(sys.argv[1]), float(sys.argv[2])
begin = time.perf_counter()
plan = SamplePlan(num_samples, 512)
batch = plan.global_batch(1, int(fraction * plan.steps_per_epoch))
"""
_DISTRIBUTED_SAMPLER = """\
import itertools, sys, time
from torch.utils.data import DistributedSampler
num_samples, fraction = int(sys.argv[1]), float(sys.argv[2])
begin = time.perf_counter()
sampler = DistributedSampler(range(num_samples), num_replicas=1, rank=0)
sampler.set_epoch(1)
first = int(fraction * (num_samples // 512)) * 512
batch = list(itertools.islice(sampler, first, first + 512))
"""
# Not ru_maxrss: a child begins with what its parent had when it forked.
_REPORT = """\
elapsed_s = time.perf_counter() - begin
assert len(batch) == 512
with open("/proc/self/status") as status:
    print(elapsed_s, next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""

_SHUFFLES = {
    "hora, 1e8 samples": (_PLAN, 10**8),
    "hora, 1e10 samples": (_PLAN, 10**10),
    "DistributedSampler, 1e8 samples": (_DISTRIBUTED_SAMPLER, 10**8),
}


def shuffle(source: str, num_samples: int, fraction: float) -> tuple[float, float]:
    """Milliseconds to the global batch that stands at `fraction` of an epoch, and the peak memory of the process in MiB. On Linux only.

    Raises:
        HoraError: the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", source + _REPORT, str(num_samples), str(fraction)],
        capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise HoraError(f"measuring {num_samples} samples ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    elapsed_s, peak_kib = map(float, done.stdout.split())
    return elapsed_s * 1e3, peak_kib / 1024


def _register_shuffles() -> None:
    start = register(Workload("data.start", "from nothing to the first global batch of an epoch", unit="ms"))
    jump = register(Workload("data.jump", "from nothing to a global batch at nine tenths of an epoch", unit="ms"))
    memory = register(Workload("data.memory", "peak memory of a process that takes one global batch", unit="MiB"))
    for variant, (source, num_samples) in _SHUFFLES.items():
        start.variant(variant)(_shuffle(source, num_samples, 0.0, 0))
        jump.variant(variant)(_shuffle(source, num_samples, 0.9, 0))
        memory.variant(variant)(_shuffle(source, num_samples, 0.0, 1))


def _shuffle(source: str, num_samples: int, fraction: float, which: int) -> Sample:
    return lambda: shuffle(source, num_samples, fraction)[which]


def nanoseconds_per_index(num_samples: int) -> float:
    """How long one index of a shuffled order takes, when global batches are taken one after the other."""
    order = SamplePlan(num_samples, GLOBAL_BATCH_SIZE).order(0)
    begin = time.perf_counter()
    count = sum(len(order.indices(order.positions(step))) for step in range(200))
    return (time.perf_counter() - begin) * 1e9 / count


def _register_indices() -> None:
    workload = register(Workload("data.indices", f"an index of a shuffled order, {GLOBAL_BATCH_SIZE} taken at a time", unit="ns"))
    workload.variant("hora, 1e8 samples")(lambda: nanoseconds_per_index(10**8))
    workload.variant("hora, 1e10 samples")(lambda: nanoseconds_per_index(10**10))


@cache
def _tensors() -> Any:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.randn(NUM_LOADED, 64), torch.arange(NUM_LOADED))


class Samples:
    """The same samples one by one, as most data sets give them."""

    def __len__(self) -> int:
        return NUM_LOADED

    def __getitem__(self, index: int) -> Any:
        return _tensors()[index]


def microseconds_per_sample(batches: Iterable[Any]) -> float:
    """How long it takes to go through `batches` once, per sample."""
    begin = time.perf_counter()
    count = sum(len(inputs) for inputs, _targets in batches)
    assert count == NUM_LOADED
    return (time.perf_counter() - begin) * 1e6 / count


def _torch_loader(dataset: Any) -> float:
    from torch.utils.data import DataLoader

    return microseconds_per_sample(DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE, shuffle=True))


def _hora_loader(dataset: Any) -> float:
    from hora.data.loader import DataLoader

    loader = DataLoader(dataset, global_batch_size=GLOBAL_BATCH_SIZE, rank=0, world_size=1)
    return microseconds_per_sample(batch for step in loader for batch in step)


def _register_loaders() -> None:
    datasets: dict[str, Callable[[], Any]] = {"a TensorDataset": _tensors, "one by one": Samples}
    for (kind, dataset), name in zip(datasets.items(), ("data.load_tensors", "data.load_samples"), strict=True):
        workload = register(Workload(name, f"an epoch of {NUM_LOADED} samples, {kind}, by the loader, a sample", unit="us"))
        workload.variant("torch DataLoader")(_epoch(_torch_loader, dataset))
        workload.variant("hora.DataLoader")(_epoch(_hora_loader, dataset))


def _epoch(load: Callable[[Any], float], dataset: Callable[[], Any]) -> Sample:
    return lambda: load(dataset())


_register_shuffles()
_register_indices()
_register_loaders()
