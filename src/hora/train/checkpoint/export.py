"""The tensors of one entry as a plain safetensors file, for other programs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hora.errors import ConfigError
from hora.train.checkpoint.content import Entry
from hora.train.checkpoint.inspection import newest
from hora.train.checkpoint.storage import verify
from hora.train.checkpoint.tensors import TensorFile
from hora.train.files import create_file

DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def export(path: Path, entry: str, to: Path, *, strip: str = "", prefix: str = "", dtype: str | None = None) -> tuple[Path, int]:
    """Writes the tensors of `entry` into the new file `to`, which appears whole or not at all.

    Args:
        path: a checkpoint, each byte of which is verified; of a directory of checkpoints or a run the newest.
        entry: such as `model`.
        to: must not exist.
        strip: taken off the beginning of names that have it, such as `module.`.
        prefix: put before all names, after that.
        dtype: what floating-point tensors become: one of `DTYPES`; None: as they are.

    Returns:
        The checkpoint, and how many tensors were written.

    Raises:
        CheckpointIncomplete: the checkpoint is damaged.
        ConfigError: there is no such checkpoint or entry, two tensors would have one name, or `to` exists or cannot be written.
    """
    checkpoint = newest(path)
    require_new(to)
    tensors = _renamed(plain_tensors(checkpoint, entry), strip, prefix)
    if dtype is not None:
        tensors = {name: tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    write_tensors(to, tensors)
    return checkpoint, len(tensors)


def plain_tensors(checkpoint: Path, entry: str) -> dict[str, Tensor]:
    """The tensors of `entry`, without what else lies among them; each byte of the checkpoint is verified.

    Raises:
        CheckpointIncomplete: it is damaged.
        ConfigError: there is no such entry.
    """
    entries = [Path(name).stem for name in verify(checkpoint).files if name.endswith(".safetensors")]
    if entry not in entries:
        raise ConfigError(f"{checkpoint} has no entry {entry!r}; choose one of: {', '.join(entries)}")
    found = Entry.read(checkpoint, entry)
    return {name: found.tensors[name] for name in _tensor_names(found.skeleton)}


def require_new(path: Path) -> None:
    """Looks whether a file can be new.

    Raises:
        ConfigError: something has that name.
    """
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} must not exist, but does; remove it or give another name")


def write_tensors(to: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a new safetensors file, which appears whole or not at all.

    Raises:
        ConfigError: it exists or cannot be written.
    """
    try:
        # Other libraries ask for this word.
        create_file(to, TensorFile(to.name, dict(tensors), metadata={"format": "pt"}).chunks())
    except OSError as error:
        raise ConfigError(
            f"cannot write {to}: {error.strerror or error}; name a new file in a directory that exists and may be written"
        ) from error


def _tensor_names(skeleton: Any) -> Iterator[str]:
    """The tensors of a tree, without what else lies among them."""
    if isinstance(skeleton, dict) and set(skeleton) == {"$tensor"}:
        yield skeleton["$tensor"]
    elif isinstance(skeleton, dict | list):
        for branch in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from _tensor_names(branch)


def _renamed(tensors: Mapping[str, Tensor], strip: str, prefix: str) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = prefix + name.removeprefix(strip)
        if new in renamed:
            raise ConfigError(f"each tensor must have a name of its own, but without {strip!r} two are called {new!r}; leave --strip out")
        renamed[new] = tensor
    return renamed
