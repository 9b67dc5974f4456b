"""Images that fit into memory, read into NumPy arrays. NumPy only."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hora.errors import ConfigError
from hora.recipes.image.cifar import Arrays, read_cifar
from hora.recipes.image.config import SyntheticConfig
from hora.recipes.image.idx import read_idx
from hora.recipes.image.places import Place, idx_files


def read_arrays(place: Place, synthetic: SyntheticConfig) -> dict[str, Arrays]:
    """Images `[n, channels, height, width]`, as bytes, and classes `[n]` of `train` and `test`.

    Raises:
        ConfigError: a file is damaged, or images and classes do not belong together.
    """
    if place.kind == "synthetic":
        return make_synthetic(synthetic)
    if place.layout is not None:
        return read_cifar(place.path, place.layout)
    files = idx_files(place.path)
    assert files is not None
    found = {split: (read_idx(images, num_dims=3)[:, None], read_idx(labels, num_dims=1)) for split, (images, labels) in files.items()}
    for split, (images, labels) in found.items():
        if len(images) != len(labels) or not len(images):
            raise ConfigError(
                f"{files[split][0]} must have as many images as {files[split][1]} has labels, and at least one, but has {len(images):,} to "
                f"{len(labels):,}"
            )
    if len(shapes := {images.shape[1:] for images, _ in found.values()}) > 1:
        raise ConfigError(f"{place.path}: training and test images must be of one size, but are of {sorted(shapes)}")
    return found


def make_synthetic(settings: SyntheticConfig) -> dict[str, Arrays]:
    """Noise, and in each class one pattern in it; the same each time."""
    generator = np.random.default_rng(0)
    shape = (settings.channels, settings.size, settings.size)
    patterns = generator.integers(0, 128, (settings.classes, *shape), dtype=np.uint8)
    made: dict[str, Arrays] = {}
    for split, count in (("train", settings.samples), ("test", max(settings.samples // 10, 1))):
        labels = generator.integers(0, settings.classes, count, dtype=np.int64)
        numbers = labels.astype(np.uint8) if settings.classes <= 1 << 8 else labels
        made[split] = generator.integers(0, 128, (count, *shape), dtype=np.uint8) + patterns[labels], numbers
    return made


def channel_statistics(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, pixels from 0 to 255; from counts, so that the order of the images changes nothing."""
    counts = np.stack([np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in range(images.shape[1])]).astype(np.float64)
    values = np.arange(256.0)
    totals = counts.sum(1)
    means = counts @ values / totals
    deviations = np.sqrt(np.maximum(counts @ values**2 / totals - means**2, 1e-12))
    return means.tolist(), deviations.tolist()


def count_classes(arrays: Mapping[str, Arrays]) -> int:
    """One more than the largest class."""
    return int(max(labels.max() for _, labels in arrays.values())) + 1
