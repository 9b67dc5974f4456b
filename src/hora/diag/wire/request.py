"""What is to be measured, as asked for on the command line. Pure; loads no torch."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Final

from hora.diag.words import fields_of, names
from hora.errors import ConfigError
from hora.plan.algorithm_table import NATIVE

DEVICES: Final = {"shm": "cpu", "gloo": "cpu", "nccl": "cuda"}
"""The backends, each with the device whose tensors it takes."""

HIERARCHICAL: Final = "hierarchical"
SYMMETRIC: Final = "symmetric"
ALGORITHMS: Final = (NATIVE, "ring", "recursive_doubling", "ordered", HIERARCHICAL, SYMMETRIC, "auto")

GRAPH: Final = "graph"
"""What a variant is called, behind its algorithm, when its calls are captured in a CUDA graph."""

_ONE_NODE_ALGORITHMS: Final = ALGORITHMS[:4]
_SMALLEST: Final = 1 << 10
_LARGEST: Final = {"cpu": 64 << 20, "cuda": 1 << 30}
_GROWTH: Final = 4
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE: Final = re.compile(r"(\d{1,15})\s*([KMG]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_ITEM_BYTES: Final = 4
_MOST_BYTES: Final = 16 << 30
_MOST_RANKS: Final = 64
"""To start; in a job there may be more."""


@dataclass(frozen=True)
class Request:
    """Every size on every number of ranks, under each pair of backend and algorithm; with `graphs` on GPUs also captured in a CUDA graph."""

    sizes: tuple[int, ...]
    backends: tuple[str, ...]
    algorithms: tuple[str, ...]
    ranks: tuple[int, ...]
    rounds: int
    graphs: bool = False

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks need a GPU each."""
        return any(DEVICES[backend] == "cuda" for backend in self.backends)

    @property
    def points(self) -> list[tuple[int, int, str]]:
        """What is measured one after the other: size, ranks and device, the backends of a device side by side."""
        devices = dict.fromkeys(DEVICES[backend] for backend in self.backends)
        return [(size, ranks, device) for size in self.sizes for ranks in self.ranks for device in devices]

    def variants(self, ranks: int, device: str, world_size: int) -> list[tuple[str, str, bool]]:
        """Backend, algorithm and whether in a graph, measured in turns. By node only all ranks together are measured."""
        return [
            (backend, algorithm, in_graph)
            for in_graph in ((False, True) if self.graphs and device == "cuda" else (False,))
            for backend in self.backends
            if DEVICES[backend] == device
            for algorithm in self.algorithms
            if (algorithm != HIERARCHICAL or ranks == world_size) and (algorithm != SYMMETRIC or device == "cuda")
        ]

    def dump(self) -> str:
        """As JSON, for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "Request":
        """From what `dump` gave."""
        return cls(**fields_of(text))


@dataclass(frozen=True)
class Asked:
    """The words of the command line; None where nothing was said."""

    sizes: str | None = None
    begin: str | None = None
    end: str | None = None
    backends: str | None = None
    algorithms: str | None = None
    ranks: str | None = None
    rounds: int = 9
    graphs: bool = False


@dataclass(frozen=True)
class Place:
    """Where the ranks will be: `world_size` is None while they are not started yet."""

    num_gpus: int
    num_nodes: int = 1
    world_size: int | None = None


def resolve(asked: Asked, place: Place) -> Request:
    """The request, with what was not said filled in.

    Raises:
        ConfigError: something is unknown or cannot be measured there.
    """
    backends = _backends(asked.backends, place)
    devices = {DEVICES[backend] for backend in backends}
    return Request(
        sizes=_sizes(asked, max(_LARGEST[device] for device in devices)),
        backends=backends,
        algorithms=_algorithms(asked.algorithms, place, on_gpus="cuda" in devices),
        ranks=_ranks(asked.ranks, place, on_gpus="cuda" in devices),
        rounds=asked.rounds,
        graphs=_graphs(asked, on_gpus="cuda" in devices),
    )


def parse_size(text: str) -> int:
    """Bytes of `1K`, `64 KiB`, `4M`, `1G` or `4096`: whole float32 numbers, at least one.

    Raises:
        ConfigError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not _ITEM_BYTES <= size <= _MOST_BYTES or size % _ITEM_BYTES:
        raise ConfigError(
            f"a size must be a number of bytes such as 4096, 64K, 4M or 1G, a multiple of {_ITEM_BYTES} and at most {say_size(_MOST_BYTES)}, but is "
            f"{text!r}"
        )
    return size


def say_size(size: int) -> str:
    """`1 KiB`, `4 MiB`; in bytes where no unit divides it."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def sizes_between(begin: int, end: int) -> tuple[int, ...]:
    """`begin`, four times that, and so on up to `end`."""
    if begin > end:
        raise ConfigError(f"--from must not be larger than --to, but {say_size(begin)} is larger than {say_size(end)}")
    sizes = [begin]
    while sizes[-1] * _GROWTH <= end:
        sizes.append(sizes[-1] * _GROWTH)
    return tuple(sizes)


def _sizes(asked: Asked, largest: int) -> tuple[int, ...]:
    if asked.sizes is None:
        begin = _SMALLEST if asked.begin is None else parse_size(asked.begin)
        return sizes_between(begin, max(begin, largest) if asked.end is None else parse_size(asked.end))
    if asked.begin is not None or asked.end is not None:
        raise ConfigError("give either --sizes, or --from and --to")
    return tuple(sorted({parse_size(word) for word in asked.sizes.split(",")}))


def _backends(words: str | None, place: Place) -> tuple[str, ...]:
    if words is None:
        return ("nccl",) if place.num_gpus else ("shm", "gloo") if place.num_nodes == 1 else ("gloo",)
    chosen = names("backend", words, tuple(DEVICES))
    if "nccl" in chosen and not place.num_gpus:
        raise ConfigError("backend nccl needs a GPU, but this machine shows none; choose from: shm, gloo")
    if "shm" in chosen and place.num_nodes > 1:
        raise ConfigError(f"backend shm serves the ranks of one host, but these are on {place.num_nodes} nodes; choose from: gloo, nccl")
    return chosen


def _graphs(asked: Asked, *, on_gpus: bool) -> bool:
    if asked.graphs and not on_gpus:
        raise ConfigError("--graphs is for GPUs, but none of the backends takes tensors of one; name nccl in --backends")
    return asked.graphs


def _algorithms(words: str | None, place: Place, *, on_gpus: bool) -> tuple[str, ...]:
    several = place.num_nodes > 1
    if words is None:
        return (*_ONE_NODE_ALGORITHMS, HIERARCHICAL) if several else (*_ONE_NODE_ALGORITHMS, SYMMETRIC) if on_gpus else _ONE_NODE_ALGORITHMS
    chosen = names("algorithm", words, ALGORITHMS)
    if SYMMETRIC in chosen and not on_gpus:
        raise ConfigError(
            "algorithm symmetric adds up in memory of GPUs, but none of the backends takes tensors of one; choose from: "
            f"{', '.join(name for name in ALGORITHMS if name != SYMMETRIC)}"
        )
    if HIERARCHICAL in chosen and not several:
        raise ConfigError(
            "algorithm hierarchical needs several nodes: start `hora run --nnodes 2 --node-rank N ... -m hora bench allreduce` on each; "
            f"on one choose from: {', '.join(name for name in ALGORITHMS if name != HIERARCHICAL)}"
        )
    return chosen


def _ranks(words: str | None, place: Place, *, on_gpus: bool) -> tuple[int, ...]:
    if words is None:
        counts = {place.world_size or (place.num_gpus if on_gpus else 2)}
    else:
        counts = {int(word) if word.strip().isascii() and word.strip().isdigit() else 0 for word in words.split(",")}
    if place.world_size is None and max(counts) > _MOST_RANKS:
        raise ConfigError(f"--ranks must be at most {_MOST_RANKS}, but is {words!r}; more can be measured inside a job")
    if min(counts) < 2:
        raise ConfigError(
            f"--ranks must be numbers from 2 on, such as 2,4: one rank alone reduces nothing; but is {words or min(counts)!r}"
        )
    if place.world_size is not None and max(counts) > place.world_size:
        raise ConfigError(f"--ranks must not be larger than the job, which has {place.world_size} ranks, but is {words!r}")
    if on_gpus and place.num_nodes == 1 and max(counts) > place.num_gpus:
        raise ConfigError(f"each rank needs a GPU of its own, but {max(counts)} ranks are asked for and {place.num_gpus} GPUs are here")
    return tuple(sorted(counts))
