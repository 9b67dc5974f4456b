"""The images on every rank, and the steps that they make.

Rank 0 reads arrays (MNIST, CIFAR, synthetic) and everybody receives them, onto the device, as bytes: only its machine needs the files, and a step
moves none. Image files in folders are read by each rank, those of its own part.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import hora
from hora import log
from hora.comm.collectives import broadcast
from hora.comm.objects import broadcast_object
from hora.comm.session import session
from hora.data.steps import Step
from hora.errors import ConfigError
from hora.plan.samples import deal
from hora.plan.seeds import derive_key
from hora.recipes.image.arrays import channel_statistics, count_classes, read_arrays
from hora.recipes.image.augment import seeds_at
from hora.recipes.image.cifar import Arrays
from hora.recipes.image.config import DataConfig, ImageConfig
from hora.recipes.image.folder import FolderImages
from hora.recipes.image.places import ImageFiles, Place, list_folder, locate
from hora.train.rank_zero import on_rank_zero

_IMAGENET_MEAN, _IMAGENET_DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


@dataclass(frozen=True)
class Facts:
    """What the images are like.

    Attributes:
        size: height and width.
        mean, deviation: of each channel of the training images, pixels from 0 to 255.
        digests: of the images and classes of each split.
    """

    channels: int
    size: int
    num_classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class Images:
    """The images of `train` and `test`: data sets of images, classes, and numbers that are seeds or will become them."""

    facts: Facts
    sets: Mapping[str, Dataset[Any]]


def load_images(data: DataConfig) -> Images:
    """Reads and spreads the images. Collective.

    Raises:
        ConfigError: on all ranks; files are missing or damaged, or are no squares.
    """
    place = locate(data.path) if session().rank == 0 else None
    kind = on_rank_zero(lambda: (place or locate(data.path)).kind)
    return _load_folder(data) if kind == "folder" else _load_arrays(data)


# ---- arrays


def _load_arrays(data: DataConfig) -> Images:
    read: dict[str, Arrays] = {}

    def look() -> dict[str, Any]:
        read.update(read_arrays(locate(data.path), data.synthetic))
        facts = _facts_of(data.path, read)
        return {**asdict(facts), "lengths": {split: len(labels) for split, (_, labels) in read.items()}}

    told = on_rank_zero(look)
    lengths: dict[str, int] = told.pop("lengths")
    facts = Facts(**{name: tuple(value) if isinstance(value, list) else value for name, value in told.items()})
    sets = {}
    for split, length in lengths.items():
        images, labels = read.pop(split, (None, None))
        shape = (length, facts.channels, facts.size, facts.size)
        indices = torch.arange(length, device=session().device)
        sets[split] = TensorDataset(_spread(images, shape), _spread(labels, (length,)).long(), indices)
    return Images(facts, sets)


def _facts_of(path: str, arrays: Mapping[str, Arrays]) -> Facts:
    images = arrays["train"][0]
    channels, height, width = images.shape[1:]
    if height != width:
        raise ConfigError(f"the images of {path} must be squares, but are of {height} x {width} pixels")
    log.get_logger().info(
        "%s: %s training and %s test images of %d x %d x %d", path, f"{len(images):,}", f"{len(arrays['test'][0]):,}", channels, height, width
    )
    mean, deviation = channel_statistics(images)
    digests = {split: hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() for split, (images, labels) in arrays.items()}
    return Facts(channels, height, count_classes(arrays), tuple(mean), tuple(deviation), digests)


def _spread(values: np.ndarray[Any, Any] | None, shape: tuple[int, ...]) -> Tensor:
    device = session().device
    tensor = torch.empty(shape, dtype=torch.uint8) if values is None else torch.tensor(values)
    return broadcast(tensor.to(device))


# ---- folders


def _load_folder(data: DataConfig) -> Images:
    """Ranks must find the files where rank 0 has found them."""

    def look() -> dict[str, Any]:
        classes, files = list_folder(locate(data.path).path)
        counts = {split: len(listed.paths) for split, listed in files.items()}
        log.get_logger().info("%s: %d classes, %s images", data.path, len(classes), counts)
        return {"classes": list(classes), "files": {split: [list(listed.paths), list(listed.labels)] for split, listed in files.items()}}

    told = on_rank_zero(look)
    files = {split: ImageFiles(tuple(paths), tuple(labels)) for split, (paths, labels) in told["files"].items()}
    digests = {split: hashlib.sha256("\n".join(listed.paths).encode()).hexdigest() for split, listed in files.items()}
    facts = Facts(3, data.size, len(told["classes"]), _IMAGENET_MEAN, _IMAGENET_DEVIATION, digests)
    directory = locate(data.path).path
    return Images(facts, {s: FolderImages(directory, listed, data.size, training=s == "train") for s, listed in files.items()})
