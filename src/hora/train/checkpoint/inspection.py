"""What stands on the disk, for people and programs that train nothing: which checkpoints, what is in them, what is damaged.

Reads only, and imports no torch.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hora.errors import CheckpointIncomplete, CheckpointMismatch, ConfigError
from hora.train.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, CheckpointName, FileFacts, Manifest
from hora.train.checkpoint.storage import Storage
from hora.train.files import open_regular

_MAX_HEADER_BYTES: Final = 100 << 20
_TENSORS: Final = ".safetensors"


@dataclass(frozen=True)
class Finding:
    """A checkpoint as it was found.

    Attributes:
        path: its directory.
        manifest: what it says of itself; None where that cannot be read.
        damage: what is wrong, by the file's name.
        is_newer: whether it was written in a format that this version does not know, so that nothing else can be said.
    """

    path: Path
    manifest: Manifest | None = None
    damage: dict[str, str] = field(default_factory=dict)
    is_newer: bool = False

    @property
    def size_bytes(self) -> int:
        """Of the files beside the manifest, as they must be."""
        return sum(facts.size_bytes for facts in self.manifest.files.values()) if self.manifest else 0

    @property
    def entries(self) -> list[str]:
        """Names of the entries that it must have."""
        return [name.removesuffix(_TENSORS) for name in self.manifest.files if name.endswith(_TENSORS)] if self.manifest else []


@dataclass(frozen=True)
class TensorFacts:
    """A tensor in a file: its type in the words of safetensors (`F32`), and its shape."""

    dtype: str
    shape: list[int]


def find(path: Path) -> list[Path]:
    """The checkpoints at `path`, the newest last: one, or those of a directory of them or of a run.

    Raises:
        ConfigError: there is none.
    """
    if CheckpointName.parse(path.resolve().name) or (path / MANIFEST).exists():
        found = [path] if path.is_dir() else []
    else:
        found = [place / str(name) for place in (path, path / "checkpoints") for name in Storage(place).names()]
    if not found:
        raise ConfigError(f"{path} must be a checkpoint (step-...), a directory of checkpoints or a run directory, but holds no checkpoint")
    return found


def inspect(path: Path, *, every_byte: bool) -> Finding:
    """Looks at one checkpoint: the manifest and the sizes of the files or, if `every_byte`, their digests."""
    try:
        with open_regular(path / MANIFEST) as file:
            manifest = Manifest.parse(file.read(MAX_MANIFEST_BYTES))
    except OSError as error:
        return Finding(path, damage={MANIFEST: error.strerror or str(error)})
    except CheckpointIncomplete as error:
        return Finding(path, damage={MANIFEST: str(error).removeprefix(f"{MANIFEST} ")})
    except CheckpointMismatch as error:
        return Finding(path, damage={MANIFEST: str(error).removeprefix(f"{MANIFEST} ")}, is_newer=True)
    damage = {}
    named = CheckpointName.parse(path.resolve().name)
    if named not in (None, manifest.name):
        damage[MANIFEST] = f"is that of {manifest.name}"
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        problems = pool.map(lambda name: _problem(path / name, manifest.files[name], every_byte), manifest.files)
        damage |= {name: problem for name, problem in zip(manifest.files, problems, strict=True) if problem}
    return Finding(path, manifest, damage)


def _problem(path: Path, facts: FileFacts, every_byte: bool) -> str | None:
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != facts.size_bytes:
                return f"must have {facts.size_bytes} bytes, but has {size_bytes} instead"
            if every_byte and hashlib.file_digest(file, "sha256").hexdigest() != facts.sha256:
                return "differs from its digest"
    except OSError as error:
        return error.strerror or str(error)
    return None


def tensors_of(path: Path, entry: str) -> dict[str, TensorFacts]:
    """The tensors of an entry of the checkpoint at `path`, from the head of its file, in their order there.

    Raises:
        CheckpointIncomplete: the file is missing or has no such head.
    """
    try:
        with open_regular(path / f"{entry}{_TENSORS}") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else {}
        return {name: TensorFacts(facts["dtype"], facts["shape"]) for name, facts in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointIncomplete(f"{path} is damaged: {entry}{_TENSORS} has no head that can be read: {error}") from error


def newest(path: Path) -> Path:
    """The newest of the checkpoints at `path`.

    Raises:
        ConfigError: there is none.
    """
    return find(path)[-1]
