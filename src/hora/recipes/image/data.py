"""The images on every rank, and the steps that they make.

Rank 0 reads arrays (MNIST, CIFAR, synthetic) and everybody receives them, onto the device, as bytes: only its machine needs the files, and a step
moves none. Image files in folders are read by each rank, those of its own part.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from hora import log
from hora.comm.collectives import broadcast
from hora.comm.session import session
from hora.data.loader import DataLoader
from hora.data.steps import Step
from hora.errors import ConfigError
from hora.plan.permutation import Permutation
from hora.plan.seeds import derive_key
from hora.recipes.image.arrays import channel_statistics, count_classes, read_arrays
from hora.recipes.image.augment import seeds_at
from hora.recipes.image.cifar import Arrays
from hora.recipes.image.config import DataConfig
from hora.recipes.image.folder import FolderImages, require_pillow
from hora.recipes.image.places import ImageFiles, Place, list_folder, locate
from hora.train.rank_zero import on_rank_zero

_LEAST_CLASSES = 2
_IMAGENET_MEAN, _IMAGENET_DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


@dataclass(frozen=True)
class Facts:
    """What the images are like.

    Attributes:
        size: height and width.
        mean, deviation: of each channel of the training images, pixels from 0 to 255.
        digests: of the images and classes of each split; of image files those of their names.
    """

    channels: int
    size: int
    num_classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class Images:
    """The images of `train` and `test`, and of `valid` where some of `train` are held out: data sets of images, classes, and seeds, or with
    `keyed_by_index` indices that become them.
    """

    facts: Facts
    sets: Mapping[str, Dataset[Any]]
    keyed_by_index: bool


Batch = tuple[Tensor, Tensor, Tensor]
"""Images `[batch, channels, size, size]` as bytes, classes `[batch]`, and a seed for each image `[batch]`."""


def load_images(data: DataConfig, seed: int) -> Images:
    """Reads and spreads the images; `seed` chooses those that are held out. Collective.

    Raises:
        ConfigError: on all ranks; files are missing or damaged, or are no squares; or no image is left to train on.
    """
    found: list[Place] = []

    def look() -> str:
        found.append(locate(data.path))
        return found[0].kind

    if on_rank_zero(look) == "folder":
        return _load_folder(data, seed)
    return _load_arrays(data, seed, found)


def hold_out(length: int, count: int, seed: int) -> tuple[list[int], list[int]]:
    """The numbers of the images that are trained on, and of those that are not, both ascending.

    Raises:
        ConfigError: none would be left.
    """
    if count >= length:
        raise ConfigError(f"data.held_out must leave images to train on, but is {count:,} of {length:,}")
    held = set(Permutation(length, seed=derive_key("held-out images", seed), epoch=0).take(range(count)))
    return [number for number in range(length) if number not in held], sorted(held)


# ---- arrays


def _load_arrays(data: DataConfig, seed: int, found: Sequence[Place]) -> Images:
    arrays: dict[str, Arrays] = {}

    def read() -> tuple[Facts, dict[str, int]]:
        arrays.update(read_arrays(found[0], data.synthetic))
        if data.held_out:
            images, labels = arrays["train"]
            kept, held = hold_out(len(labels), data.held_out, seed)
            arrays["train"], arrays["valid"] = (images[kept], labels[kept]), (images[held], labels[held])
        return _facts_of(data.path, arrays), {split: len(labels) for split, (_, labels) in arrays.items()}

    facts, lengths = on_rank_zero(read)
    sets = {}
    for split, length in lengths.items():
        images, labels = arrays.pop(split, (None, None))
        indices = torch.arange(length, device=session().device)
        shape = (length, facts.channels, facts.size, facts.size)
        sets[split] = TensorDataset(_spread(images, shape, torch.uint8), _spread(labels, (length,), torch.int64), indices)
    return Images(facts, sets, keyed_by_index=True)


def _facts_of(path: str, arrays: Mapping[str, Arrays]) -> Facts:
    images = arrays["train"][0]
    channels, height, width = images.shape[1:]
    if height != width:
        raise ConfigError(f"the images of {path} must be squares, but are of {height} x {width} pixels")
    log.get_logger().info(
        "%s: %s images of %d x %d x %d",
        path,
        _say_counts({split: len(labels) for split, (_, labels) in arrays.items()}),
        channels,
        height,
        width,
    )
    if (num_classes := count_classes(arrays)) < _LEAST_CLASSES:
        raise ConfigError(
            f"the images of {path} must be of two classes or more, for a model learns to tell them apart, but all are of class 0"
        )
    mean, deviation = channel_statistics(images)
    digests = {split: hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() for split, (images, labels) in arrays.items()}
    return Facts(channels, height, num_classes, tuple(mean), tuple(deviation), digests)


def _spread(values: np.ndarray[Any, Any] | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    device = session().device
    tensor = torch.empty(shape, dtype=dtype) if values is None else torch.tensor(values, dtype=dtype)
    return broadcast(tensor.to(device))


# ---- folders


def _load_folder(data: DataConfig, seed: int) -> Images:
    """Ranks must find the files where rank 0 has found them."""

    def look() -> tuple[list[str], dict[str, ImageFiles]]:
        require_pillow()
        classes, files = list_folder(Path(data.path))
        if data.held_out:
            kept, held = hold_out(len(files["train"].labels), data.held_out, seed)
            files |= {"train": files["train"].pick(kept), "valid": files["train"].pick(held)}
        counts = _say_counts({split: len(listed.labels) for split, listed in files.items()})
        log.get_logger().info("%s: %d classes, %s images", data.path, len(classes), counts)
        return list(classes), files

    classes, files = on_rank_zero(look)
    digests = {split: hashlib.sha256(os.fsencode("\n".join(listed.paths))).hexdigest() for split, listed in files.items()}
    facts = Facts(3, data.size, len(classes), _IMAGENET_MEAN, _IMAGENET_DEVIATION, digests)
    sets = {split: FolderImages(Path(data.path), listed, data.size, training=split == "train") for split, listed in files.items()}
    return Images(facts, sets, keyed_by_index=False)


_SPLITS = {"train": "training", "valid": "held-out", "test": "test"}


def _say_counts(counts: Mapping[str, int]) -> str:
    said = [f"{counts[split]:,} {word}" for split, word in _SPLITS.items() if split in counts]
    return f"{', '.join(said[:-1])} and {said[-1]}"


# ---- steps


class SeededStep:
    """A step whose micro-batches are images, classes and a seed for each image, in the place of its index."""

    def __init__(self, step: Step, key: int) -> None:
        self.epoch, self.index, self.logical_ranks = step.epoch, step.index, step.logical_ranks
        self._step, self._key = step, key

    def __len__(self) -> int:
        return len(self._step)

    def __iter__(self) -> Iterator[Batch]:
        for images, labels, indices in self._step:
            yield images, labels, seeds_at(self._key, indices)


class ImageLoader:
    """The steps of a split, epoch after epoch.

    Collective: all ranks make it and iterate it alike.

    Attributes:
        loader: deals the images, and has the position.
    """

    def __init__(self, images: Images, split: str, data: DataConfig, *, training: bool, seed: int) -> None:
        self.loader = DataLoader(
            images.sets[split],
            global_batch_size=data.global_batch_size if training else data.eval_batch_size,
            micro_batch_size=data.micro_batch_size,
            shuffle=training,
            seed=seed,
            drop_last=training and data.drop_last,
            num_workers=0 if images.keyed_by_index else data.num_workers,
        )
        self._keyed_by_index, self._seed = images.keyed_by_index, seed

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one between two."""
        return self.loader.epoch

    @property
    def step(self) -> int:
        """How many steps of it have been handed out."""
        return self.loader.step

    def __iter__(self) -> Iterator[Step | SeededStep]:
        for step in self.loader:
            key = derive_key("augmentation", self._seed, step.epoch)
            yield SeededStep(step, key) if self._keyed_by_index else step

    def __len__(self) -> int:
        return len(self.loader)
