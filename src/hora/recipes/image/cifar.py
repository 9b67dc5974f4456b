"""CIFAR-10 and CIFAR-100, from the binary files or those for Python, in a directory or in the archive as it is fetched. NumPy only."""

import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hora.errors import ConfigError
from hora.recipes.image.layouts import UNREADABLE, Layout, reason_of
from hora.recipes.image.pickled import read_pickled

_PIXELS: Final = 3 * 32 * 32
_MOST_BYTES: Final = 1 << 28


Arrays = tuple[NDArray[np.uint8], NDArray[Any]]
"""Images `[n, 3, 32, 32]` and their classes `[n]`, integers."""


def read_cifar(path: Path, layout: Layout) -> dict[str, Arrays]:
    """The images of `train` and `test`.

    Raises:
        ConfigError: a file is damaged; names it and the byte.
    """
    contents = _contents(path, layout.names)
    return {split: _join([_read(path / name, contents[name], layout) for name in names]) for split, names in _splits(layout).items()}


def _splits(layout: Layout) -> Mapping[str, Sequence[str]]:
    return {"train": layout.train, "test": layout.test}


def _join(parts: Sequence[Arrays]) -> Arrays:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read(path: Path, content: bytes, layout: Layout) -> Arrays:
    images, labels = _from_pickle(path, content, layout) if layout.label_key else _from_records(path, content, layout)
    if wrong := np.flatnonzero(labels >= layout.num_classes).tolist():
        raise ConfigError(f"{path}: classes must be below {layout.num_classes}, but image {wrong[0]} has {labels[wrong[0]]}; fetch it anew")
    return images, labels


def _from_records(path: Path, content: bytes, layout: Layout) -> Arrays:
    size = layout.label_bytes + _PIXELS
    count, rest = divmod(len(content), size)
    if rest or not count:
        raise ConfigError(
            f"{path} must be images of {size:,} bytes each, but ends at byte {len(content):,}, {rest:,} bytes into image {count:,}; fetch it anew"
        )
    records = np.frombuffer(content, np.uint8).reshape(count, size)
    return records[:, layout.label_bytes :].reshape(count, 3, 32, 32), records[:, layout.label_bytes - 1]


def _from_pickle(path: Path, content: bytes, layout: Layout) -> Arrays:
    found = read_pickled(content, path)
    images, labels = found.get("data"), found.get(layout.label_key)
    rows = images if isinstance(images, np.ndarray) and images.ndim == 2 and images.shape[1] == _PIXELS else None
    if (
        rows is None
        or not isinstance(labels, list)
        or not labels
        or len(labels) != len(rows)
        or not all(isinstance(label, int) and 0 <= label < 256 for label in labels)
    ):
        raise ConfigError(
            f"{path} must hold `data`, one row or more of {_PIXELS:,} bytes, and as many numbers in `{layout.label_key}`, but holds "
            + _describe(found)
        )
    return rows.reshape(-1, 3, 32, 32), np.array(labels, np.uint8)


def _describe(found: Mapping[str, Any]) -> str:
    shapes = {name: list(value.shape) if isinstance(value, np.ndarray) else type(value).__name__ for name, value in found.items()}
    return ", ".join(f"`{name}` ({shape})" for name, shape in shapes.items()) or "nothing"


# ---- where the bytes come from


def _contents(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    try:
        if path.is_dir():
            return {name: (path / name).read_bytes() for name in names}
        return _from_archive(path, set(names))
    except UNREADABLE as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}; fetch it anew") from error


def _from_archive(path: Path, names: set[str]) -> dict[str, bytes]:
    """The members that are asked for; nothing is unpacked to the disk."""
    found: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            file = archive.extractfile(member) if name in names and member.isfile() and member.size <= _MOST_BYTES else None
            if file is not None:
                found[name] = file.read()
    if missing := sorted(names - found.keys()):
        raise ConfigError(f"{path} must hold {', '.join(sorted(names))}, but lacks {', '.join(missing)}; fetch it anew")
    return found
