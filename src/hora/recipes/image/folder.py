"""Image files in a folder for each class, read one by one with Pillow, which is loaded when it is needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hora.errors import ConfigError
from hora.recipes.image.places import ImageFiles

_SHORTER_SIDE = 256 / 224
"""Of an image in evaluation, in sizes of the crop out of its middle."""
_AREA, _LOG_ASPECT = (0.08, 1.0), 0.2876820724517809  # log(4 / 3)
_TRIES = 10


def require_pillow() -> Any:
    """The module `PIL.Image`.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("image files are read with Pillow, which is not installed; pip install 'hora[images]'") from error
    return Image


class UnreadableImage(ConfigError):
    """A file is no image that can be read.

    Torch tells what a worker process has raised by an error of the same class whose text is the worker's traceback: the sentence at its end says all.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2].rstrip())


class FolderImages(Dataset[tuple[Tensor, int, int]]):
    """Images as bytes `[3, size, size]`, their classes, and a seed for what is done at random on the device.

    Training images are a random part of 8 to 100 % of the area (Szegedy and others, arXiv:1409.4842), others the middle.
    """

    def __init__(self, directory: Path, files: ImageFiles, size: int, *, training: bool) -> None:
        require_pillow()
        self._directory, self._files, self._size, self._training = directory, files, size, training

    def __len__(self) -> int:
        return len(self._files.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        path = self._directory / self._files.paths[index]
        pillow = require_pillow()
        try:
            with pillow.open(path) as file:
                image = file.convert("RGB")
        # All of which Pillow raises of a damaged file; the last of one that promises far more pixels than photographs have.
        except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
            raise UnreadableImage(f"{path} is no image that can be read: {error}; remove it, or put a whole one in its place") from error
        box = random_box(*image.size) if self._training else middle_box(*image.size)
        pixels = np.asarray(image.resize((self._size, self._size), resample=2, box=box))
        # The loader has seeded the generator by epoch and place in it.
        seed = int(torch.randint(2**62, ())) if self._training else 0
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), self._files.labels[index], seed


def random_box(width: int, height: int) -> Sequence[float]:
    """Left, upper, right and lower border of a random part, drawn from the global generator of torch."""
    for _ in range(_TRIES):
        area, aspect, across, down = torch.rand(4).tolist()
        area = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
        ratio = float(np.exp((2 * aspect - 1) * _LOG_ASPECT))
        wide, high = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and high <= height:
            left, upper = across * (width - wide), down * (height - high)
            return left, upper, left + wide, upper + high
    return _square(width, height, min(width, height))


def middle_box(width: int, height: int) -> Sequence[float]:
    """The square in the middle that is left when the shorter side is scaled to 256 and 224 pixels are cropped."""
    return _square(width, height, min(width, height) / _SHORTER_SIDE)


def _square(width: int, height: int, side: float) -> Sequence[float]:
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side
