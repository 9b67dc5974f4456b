"""What a rank has recorded of a step, and its file: arrays as safetensors, the rest as JSON in its metadata.

Written in the script's processes, read by the command. No torch: the command compares with NumPy alone.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

KINDS: Final = ("gradient", "parameter", "buffer", "state")
"""Kinds of tensors, in the order in which a step makes them."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TensorFacts:
    """One tensor: a digest of its bits, and a sketch of its values."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    sketch: Array

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Rows:
    """One input tensor of one forward: `keys[0]` tells its rows apart, `keys[1]` (of tensors with two dimensions or more) its columns.

    A key is two numbers, of type int64 for integers (exact) and float64 for others.
    """

    slot: str
    shape: tuple[int, ...]
    dtype: str
    keys: tuple[Array, ...]

    @property
    def whole(self) -> bool:
        """Whether the values are whole numbers (or truth values)."""
        return bool(self.keys) and self.keys[0].dtype.kind == "i"


@dataclass(frozen=True)
class MicroStep:
    """One backward: the value of the loss, and how many terms its mean was taken over (None: no mean that could be seen)."""

    loss: float
    denominator: int | None = None


@dataclass(frozen=True)
class StepRecord:
    """What one rank saw of one step. Step 0 is what was there before the first; the last record of a rank (`end`) has no tensors.

    Attributes:
        optimizer: which of the script's optimizers stepped, counted from 0.
        tensors: by kind and name; gradients before the update, all others after it.
        forwards: inputs of each training forward.
        evaluation: inputs of each evaluating forward since the step before.
        groups: hyperparameters of each parameter group.
        samples: indices that Hora's loader handed out.
        notes: what else was seen.
    """

    rank: int
    world_size: int
    step: int
    optimizer: int = 0
    tensors: Mapping[str, Mapping[str, TensorFacts]] = field(default_factory=dict)
    forwards: tuple[tuple[Rows, ...], ...] = ()
    evaluation: tuple[tuple[Rows, ...], ...] = ()
    micro_steps: tuple[MicroStep, ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()
    samples: tuple[int, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def facts(self, kind: str) -> Mapping[str, TensorFacts]:
        """The tensors of a kind by name."""
        return self.tensors.get(kind, {})


END: Final = 2**31 - 1
"""The step under which the record of a rank's end is kept."""

_BEGUN = re.compile(r"rank(\d+)\.begun")
_NAME = re.compile(r"rank(\d+)-step(\d+)\.safetensors")


def record_path(directory: Path, rank: int, step: int) -> Path:
    """Where the record of a step lies."""
    return directory / f"rank{rank}-step{step:010d}.safetensors"


def write_begun(directory: Path, rank: int, step: int) -> None:
    """Leaves word that a rank is in a step: all that is known of it if it never ends."""
    (directory / f"rank{rank}.begun").write_text(str(step), encoding="utf-8")


def write_record(directory: Path, record: StepRecord) -> None:
    """Writes the file of a record; it appears whole."""
    arrays: dict[str, Array] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays[str(len(arrays))] = np.ascontiguousarray(value)
            return {"$array": str(len(arrays) - 1)}
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if is_dataclass(value):
            return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    text = json.dumps(plain(record))
    path = record_path(directory, record.rank, record.step)
    beside = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    save_file(arrays or {"none": np.zeros(1)}, beside, metadata={"record": text})
    beside.replace(path)


def read_record(path: Path) -> StepRecord:
    """The record in a file."""
    with safe_open(path, framework="np") as file:
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        fields = json.loads(file.metadata()["record"], object_hook=lambda item: arrays[item["$array"]] if "$array" in item else item)
    fields["tensors"] = {
        kind: {name: TensorFacts(**facts | {"shape": tuple(facts["shape"])}) for name, facts in named.items()}
        for kind, named in fields["tensors"].items()
    }
    for name in ("forwards", "evaluation"):
        fields[name] = tuple(tuple(_rows(rows) for rows in forward) for forward in fields[name])
    fields["micro_steps"] = tuple(MicroStep(**micro) for micro in fields["micro_steps"])
    return StepRecord(**fields | {"groups": tuple(fields["groups"]), "samples": tuple(fields["samples"])})


def _rows(fields: dict[str, Any]) -> Rows:
    return Rows(fields["slot"], tuple(fields["shape"]), fields["dtype"], tuple(fields["keys"]))


@dataclass(frozen=True)
class Run:
    """What all ranks of one run have recorded: by rank, then by step (0 is before the first).

    Attributes:
        ends: the last record of each rank that came to its end.
        begun: the last step that each rank called its model in.
    """

    ranks: int
    records: Mapping[int, Mapping[int, StepRecord]]
    ends: Mapping[int, StepRecord] = field(default_factory=dict)
    begun: Mapping[int, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps that every rank has recorded."""
        return min(self.steps_by_rank.values(), default=0)

    @property
    def steps_by_rank(self) -> dict[int, int]:
        """How many steps each rank has recorded."""
        return {rank: max(steps, default=0) for rank, steps in sorted(self.records.items())}

    def at(self, step: int) -> list[StepRecord]:
        """The records of a step, by rank."""
        return [steps[step] for _, steps in sorted(self.records.items()) if step in steps]

    def evaluations(self, step: int) -> list[tuple[tuple[Rows, ...], ...]]:
        """What each rank evaluated between `step` and the next."""
        later = {rank: self.records[rank].get(step + 1, self.ends.get(rank)) for rank in sorted(self.records)}
        return [record.evaluation if record is not None and step in self.records[rank] else () for rank, record in later.items()]


class RecordFiles(Mapping[int, StepRecord]):
    """Records of one rank by step, read when they are looked at: those of a large model do not all fit into memory."""

    def __init__(self, paths: Mapping[int, Path]):
        self._paths = paths

    def __getitem__(self, step: int) -> StepRecord:
        return _read_once(self._paths[step])

    def __iter__(self) -> Iterator[int]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


_read_once = lru_cache(maxsize=128)(read_record)


def read_run(directory: Path, ranks: int) -> Run:
    """All that was recorded in `directory`."""
    paths: dict[int, dict[int, Path]] = {}
    ends: dict[int, StepRecord] = {}
    begun: dict[int, int] = {}
    for path in sorted(directory.iterdir()):
        if (match := _BEGUN.fullmatch(path.name)) is not None:
            begun[int(match[1])] = int(path.read_text(encoding="utf-8") or 0)
        elif (match := _NAME.fullmatch(path.name)) is not None:
            rank, step = int(match[1]), int(match[2])
            by_step = paths.setdefault(rank, {})
            if step == END:
                ends[rank] = read_record(path)
            else:
                by_step[step] = path
    return Run(ranks, {rank: RecordFiles(by_step) for rank, by_step in paths.items()}, ends, begun)
