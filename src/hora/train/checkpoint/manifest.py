"""The facts about one checkpoint: what its directory is called and what stands in its manifest.

Pure: nothing here touches a file. A manifest is JSON that ends with a digest of itself and is accepted only byte for byte as it was
written, so that no flipped bit passes; it lists each other file with its size and SHA-256.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from hora.errors import CheckpointIncomplete, CheckpointMismatch, ConfigError

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
MAX_MANIFEST_BYTES: Final = 16 << 20

_DIRECTORY = re.compile(r"step-([0-9]{8,15})\.g([0-9]{1,9})")
_ENTRY = re.compile(r"[A-Za-z0-9_-]{1,48}")
_RANK_ENTRY = re.compile(r"rank-[0-9]+")

FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}\z")]


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Name of a checkpoint's directory. The order is that of age: a later generation is newer whatever its step."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}.g{self.generation}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        """Reads `step-00001200.g0`; None if `text` is no such name."""
        match = _DIRECTORY.fullmatch(text)
        name = match and cls(generation=int(match[2]), step=int(match[1]))
        return name if name and str(name) == text else None


@dataclass(frozen=True)
class FileFacts:
    """What a file must be."""

    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds and how it came about.

    Attributes:
        step: updates done.
        generation: number of the start of the job that wrote it, counted over the life of the directory; newer means higher.
        logical_ranks: how many logical ranks have a state of their own in it.
        exact: what fixed the bits of the run, as `hora.Exact` writes itself; None outside exact mode.
        device: model of the GPU, or of the processor, of rank 0.
        metric: what the best checkpoints are chosen by; None when not measured or not finite.
        created: date and time (UTC), for people.
        files: each file beside the manifest, by name.
    """

    format: int
    hora: str
    torch: str
    step: Annotated[int, Field(ge=0)]
    epoch: Annotated[int, Field(ge=0)]
    generation: Annotated[int, Field(ge=0)]
    world_size: Annotated[int, Field(ge=1)]
    logical_ranks: Annotated[int, Field(ge=1)]
    exact: str | None
    device: str
    metric: float | None
    created: str
    files: dict[FileName, FileFacts]

    @property
    def name(self) -> CheckpointName:
        """Name of the directory it belongs into."""
        return CheckpointName(generation=self.generation, step=self.step)

    def render(self) -> bytes:
        """The manifest as a file."""
        return _seal(asdict(self))

    @classmethod
    def parse(cls, content: bytes) -> "Manifest":
        """Reads what `render` wrote.

        Raises:
            CheckpointIncomplete: `content` is anything else.
            CheckpointMismatch: it was written in a format that this version does not know.
        """
        try:
            data = json.loads(content, parse_constant=_refuse)
            del data["sha256"]
            whole = _seal(data) == content
        except (ValueError, KeyError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise CheckpointIncomplete(f"{MANIFEST} is damaged: it differs from its own digest")
        if data.get("format") != FORMAT:
            raise CheckpointMismatch(
                f"{MANIFEST} must have format {FORMAT}, but has {data.get('format')!r}; read it with a newer version of hora"
            )
        try:
            return _ADAPTER.validate_json(json.dumps([data]))[0]
        except ValidationError as error:
            raise CheckpointIncomplete(f"{MANIFEST} is no manifest: {error.errors()[0]['loc'][1:]}: {error.errors()[0]['msg']}") from error


_ADAPTER: TypeAdapter[tuple[Manifest]] = TypeAdapter(tuple[Manifest], config=ConfigDict(strict=True, extra="forbid"))


def _seal(data: Mapping[str, Any]) -> bytes:
    body = json.dumps(data, indent=1, allow_nan=False).encode()
    digest = hashlib.sha256(body).hexdigest()
    return body.removesuffix(b"\n}") + f',\n "sha256": "{digest}"\n}}\n'.encode()


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def finite(metric: float | None) -> float | None:
    """`metric`, or None when it is no finite number: such a checkpoint is never the best one."""
    return float(metric) if metric is not None and math.isfinite(metric) else None


def check_count(name: str, value: int) -> None:
    """Refuses a step or an epoch that cannot be one.

    Raises:
        ConfigError: `value` is no integer, negative, or has more than 15 digits.
    """
    if type(value) is not int or not 0 <= value < 10**15:
        raise ConfigError(f"{name} must be an integer from 0 with at most 15 digits, but is {value!r} instead")


def check_entries(names: Sequence[str]) -> None:
    """Refuses names that cannot be file names of a checkpoint.

    Raises:
        ConfigError: names all that are wrong.
    """
    wrong = [name for name in names if not _ENTRY.fullmatch(name) or name == "manifest" or is_rank_entry(name)]
    if wrong:
        raise ConfigError(
            f"each entry of a checkpoint must be named with 1 to 48 letters, digits, _ or -, and not manifest or rank-N, but is {wrong} instead"
        )


def rank_entry(logical_rank: int) -> str:
    """Name under which the state of one logical rank is kept."""
    return f"rank-{logical_rank:05d}"


def is_rank_entry(name: str) -> bool:
    """Whether an entry is the state of one logical rank."""
    return bool(_RANK_ENTRY.fullmatch(name))
