"""How the archives of CIFAR-10 and CIFAR-100 are laid out. Standard library only."""

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from hora.errors import ConfigError

UNREADABLE: Final = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)
"""What reading an archive raises if it is damaged, however it is packed."""


def reason_of(error: Exception) -> str:
    """What `UNREADABLE` says, in a line: tarfile lists below it what each kind of packing found."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(":")


@dataclass(frozen=True)
class Layout:
    """How one of the archives is laid out: its files, and the bytes before the pixels of an image, of which the last is its class."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    num_classes: int
    label_bytes: int = 0
    label_key: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All files that are needed."""
        return (*self.train, *self.test)


_FIVE: Final = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS: Final = (
    Layout(tuple(f"{name}.bin" for name in _FIVE), ("test_batch.bin",), 10, label_bytes=1),
    Layout(("train.bin",), ("test.bin",), 100, label_bytes=2),
    Layout(_FIVE, ("test_batch",), 10, label_key="labels"),
    Layout(("train",), ("test",), 100, label_key="fine_labels"),
)


def find_layout(path: Path) -> Layout | None:
    """The layout of the files at `path`, a directory or a tar archive; None if they are not CIFAR's."""
    if path.is_dir():
        return next((layout for layout in LAYOUTS if all((path / name).is_file() for name in layout.names)), None)
    if not path.is_file() or not path.name.endswith((".tar.gz", ".tgz", ".tar")):
        return None
    names = {PurePosixPath(name).name for name in _members(path)}
    return next((layout for layout in LAYOUTS if names.issuperset(layout.names)), None)


def _members(path: Path) -> Iterator[str]:
    try:
        with tarfile.open(path) as archive:
            yield from archive.getnames()
    except UNREADABLE as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}; fetch it anew") from error
