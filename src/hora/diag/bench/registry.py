"""What can be measured: workloads, each with the variants that do the same job in different ways.

A module of this package registers its workloads when it is imported, so a new bench is a new file: `hora bench NAME` imports
`hora.diag.bench.NAME` and measures every workload registered there. Variants of a workload are measured in turns (each round measures all
of them, beginning with another one), so that a slow minute of the machine falls on all alike. Loads torch only if a variant does.
"""

import importlib
import pkgutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import hora.diag.bench
from hora.errors import ConfigError

Sample = Callable[[], float]
"""Does the work once and returns the measured value."""

_MACHINERY = ("registry", "rows")


@dataclass(frozen=True)
class Measurement:
    """Samples of one variant, in the order in which they were taken."""

    workload: "Workload"
    variant: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of the samples."""
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Workload:
    """One job to measure.

    Args:
        name: what stands in the rows, `launch.all_reduce`.
        summary: one line for people.
        unit: of the samples; smaller is better.
        ranks: how many processes take part.
    """

    name: str
    summary: str
    unit: str
    ranks: int = 1
    variants: dict[str, Sample] = field(default_factory=dict)

    def variant(self, name: str) -> Callable[[Sample], Sample]:
        """Registers the decorated function as the variant `name`; the first one is what the others are compared with."""

        def add(sample: Sample) -> Sample:
            self.variants[name] = sample
            return sample

        return add

    def measure(self, rounds: int, on_sample: Callable[[str, float], None] = lambda _variant, _value: None) -> list[Measurement]:
        """Measures all variants in turns, `rounds` times each, after one round that does not count."""
        samples: dict[str, list[float]] = {name: [] for name in self.variants}
        for round_index in range(-1, rounds):
            for name in rotated(list(self.variants), round_index):
                value = self.variants[name]()
                if round_index >= 0:
                    samples[name].append(value)
                    on_sample(name, value)
        return [Measurement(self, name, tuple(values)) for name, values in samples.items()]


_workloads: list[Workload] = []


def register(workload: Workload) -> Workload:
    """Makes `workload` known; returns it."""
    _workloads.append(workload)
    return workload


def available() -> list[str]:
    """The names that `hora bench` knows."""
    modules = (module.name for module in pkgutil.iter_modules(hora.diag.bench.__path__))
    return sorted(name for name in modules if name not in _MACHINERY and not name.startswith("_"))


def workloads_of(name: str) -> list[Workload]:
    """Imports the bench `name` and returns its workloads.

    Raises:
        ConfigError: there is no such bench.
    """
    if name not in available():
        raise ConfigError(f"unknown bench {name!r}; choose one of: {', '.join(available())}")
    importlib.import_module(f"hora.diag.bench.{name}")
    return [workload for workload in _workloads if workload.name.split(".")[0] == name]


def rotated(names: Sequence[str], by: int) -> list[str]:
    """`names`, beginning `by` places further on."""
    start = by % len(names)
    return [*names[start:], *names[:start]]
