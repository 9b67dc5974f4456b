"""Objects in files, on their way from one process to another: values, tensors and arrays, in the encoding that messages between ranks have."""

from pathlib import Path

import numpy as np
import torch

from hora.comm.codec import Tree
from hora.comm.parcel import Letter, Parcel
from hora.writing import replace_with

_NO_LIMIT = 1 << 62


def write_object(path: Path, obj: Tree, place: str) -> None:
    """Writes `obj`, which errors call `place`, to the file `path`; it appears whole or not at all.

    Raises:
        ConfigError: something in it cannot travel; the message names its place.
    """
    letter = Parcel.pack(obj, _NO_LIMIT, (place,)).letter(_NO_LIMIT)
    replace_with(path, [letter.numpy().data], durable=False)


def read_object(path: Path) -> Tree:
    """What `write_object` wrote; tensors are on the CPU.

    Raises:
        ConfigError: it holds a dataclass that is not loaded here, or is damaged.
    """
    content = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    return Letter(content).open(torch.device("cpu"))
