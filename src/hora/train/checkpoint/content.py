"""What stands in a checkpoint: entries, each a tree that is kept as two files, and how rank 0 gives them to all ranks."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from hora.comm.codec import decode, encode
from hora.comm.collectives import broadcast
from hora.comm.dtypes import DTYPES, dtype_name
from hora.comm.session import session
from hora.errors import CheckpointIncomplete, ConfigError
from hora.train.checkpoint.manifest import Manifest
from hora.train.checkpoint.storage import verify
from hora.train.checkpoint.tensors import TensorFile, as_bytes, read_tensors
from hora.train.files import open_regular
from hora.train.rank_zero import on_rank_zero


class ContentFile(Protocol):
    """A file to be written: its name, its size, and its bytes when they are asked for."""

    name: str
    size_bytes: int

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in order."""


class JsonFile:
    """Plain data as JSON."""

    def __init__(self, name: str, data: Any) -> None:
        self.name = name
        self._content = json.dumps(data, allow_nan=False).encode()
        self.size_bytes = len(self._content)

    def chunks(self) -> Iterator[memoryview]:
        """The whole text."""
        yield memoryview(self._content)


@dataclass(frozen=True)
class Entry:
    """A named tree, apart: the tensors in it, and the plain data around them (see `hora.comm.codec`)."""

    name: str
    skeleton: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, name: str, tree: Any) -> "Entry":
        """Takes a tree apart.

        Raises:
            ConfigError: something in it cannot be kept; the message names the place in the tree.
        """
        try:
            return cls(name, *encode(tree))
        except ConfigError as error:
            raise ConfigError(f"entry {name!r} of the checkpoint: {error}") from error

    @classmethod
    def read(cls, directory: Path, name: str) -> "Entry":
        """Reads the two files of an entry."""
        with open_regular(directory / f"{name}.json") as file:
            skeleton = json.load(file)
        return cls(name, skeleton, read_tensors(directory / f"{name}.safetensors"))

    def with_tensors(self, found: Mapping[str, Tensor]) -> "Entry":
        """The entry with those of `found` in the place of its own of their names."""
        return Entry(self.name, self.skeleton, {name: found.get(name, tensor) for name, tensor in self.tensors.items()})

    def files(self) -> list[ContentFile]:
        """What is to be written."""
        return [TensorFile(f"{self.name}.safetensors", self.tensors), JsonFile(f"{self.name}.json", self.skeleton)]

    def tree(self) -> Any:
        """Puts the tree together again."""
        return decode(self.skeleton, self.tensors)

    def outline(self) -> dict[str, Any]:
        """The entry without the values of its tensors, as plain data."""
        shapes = {name: [dtype_name(tensor.dtype), *tensor.shape] for name, tensor in self.tensors.items()}
        return {"skeleton": self.skeleton, "tensors": shapes}

    @classmethod
    def from_outline(cls, name: str, outline: dict[str, Any]) -> "Entry":
        """An entry whose tensors have no values yet."""
        shapes = outline["tensors"].items()
        return cls(
            name, outline["skeleton"], {key: torch.empty(shape, dtype=DTYPES[dtype], device="cpu") for key, (dtype, *shape) in shapes}
        )


@dataclass(frozen=True)
class Content:
    """A checkpoint in memory, on the CPU."""

    path: Path
    manifest: Manifest
    entries: dict[str, Entry]

    @classmethod
    def read(cls, path: Path, entries: Collection[str] | None = None) -> "Content":
        """Reads and verifies the checkpoint at `path`, or these `entries` of it, as far as it has them.

        Raises:
            CheckpointIncomplete: a file is missing or differs from its digest.
            CheckpointMismatch: it was written by a newer version.
        """
        manifest = verify(path, entries)
        names = [name for name in dict.fromkeys(Path(file).stem for file in manifest.files) if entries is None or name in entries]
        try:
            return cls(path, manifest, {name: Entry.read(path, name) for name in names})
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointIncomplete(f"{path} is damaged: {error}") from error

    def outline(self) -> dict[str, Any]:
        """The checkpoint without the values of its tensors, as plain data."""
        entries = {name: entry.outline() for name, entry in self.entries.items()}
        return {"path": str(self.path), "manifest": self.manifest.render(), "entries": entries}

    @classmethod
    def from_outline(cls, outline: dict[str, Any]) -> "Content":
        """A checkpoint whose tensors have no values yet."""
        entries = {name: Entry.from_outline(name, entry) for name, entry in outline["entries"].items()}
        return cls(Path(outline["path"]), Manifest.parse(outline["manifest"]), entries)


def share(read: Callable[[], Content]) -> Content:
    """Lets rank 0 `read` and gives the content to every rank, tensor by tensor.

    Collective: all ranks call it. An error on rank 0 is raised on every rank.
    """
    read_here: list[Content] = []

    def read_and_outline() -> dict[str, Any]:
        read_here.append(read())
        return read_here[0].outline()

    outline = on_rank_zero(read_and_outline)
    content = read_here[0] if read_here else Content.from_outline(outline)
    for entry in content.entries.values():
        for tensor in entry.tensors.values():
            share_tensor(tensor)
    return content


def share_tensor(tensor: Tensor, *, message_bytes: int = 64 << 20) -> None:
    """Overwrites a contiguous CPU tensor with rank 0's, bit by bit and whatever its type, in messages of at most `message_bytes`.

    Collective: all ranks call it with one size.
    """
    device = session().device
    for piece in as_bytes(tensor).split(message_bytes):
        if piece.numel():
            staged = piece.to(device)
            broadcast(staged)
            piece.copy_(staged)
