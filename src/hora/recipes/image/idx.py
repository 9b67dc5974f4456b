"""Files in the idx format of MNIST, plain or through gzip. NumPy only."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hora.errors import ConfigError

_UNSIGNED_BYTES: Final = 0x08


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_idx(path: Path, *, num_dims: int) -> NDArray[np.uint8]:
    """The array of bytes in the file at `path`.

    Raises:
        ConfigError: the file cannot be read, is damaged, too short or too long, or holds something else; names the file and the byte.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            return _read(gzip.GzipFile(fileobj=raw) if zipped else raw, path, num_dims)
    except OSError as error:  # of a file that is no gzip, too
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; fetch it anew") from error


def _read(file: _Readable, path: Path, num_dims: int) -> NDArray[np.uint8]:
    magic = _take(file, path, 0, 4)
    if magic != bytes((0, 0, _UNSIGNED_BYTES, num_dims)):
        raise ConfigError(
            f"{path}: an idx file of bytes in {num_dims} dimensions must begin with 0x{_UNSIGNED_BYTES << 8 | num_dims:08x}, but begins with "
            f"0x{magic.hex()} at byte 0; give the right file"
        )
    shape = struct.unpack(f">{num_dims}I", _take(file, path, 4, 4 * num_dims))
    begin = 4 + 4 * num_dims
    content = _take(file, path, begin, math.prod(shape), shape)
    if _part(file, path, begin + len(content), 1):
        raise ConfigError(f"{path} must end at byte {begin + len(content):,} by its header, {shape}, but goes on; fetch it anew")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _take(file: _Readable, path: Path, at: int, count: int, shape: tuple[int, ...] = ()) -> bytes:
    # In pieces: a header that is damaged may promise more than there is memory for.
    parts, came = [], 0
    while came < count and (part := _part(file, path, at + came, min(count - came, 1 << 24))):
        parts.append(part)
        came += len(part)
    if came < count:
        promised = f" by its header, {shape}," if shape else ""
        raise ConfigError(f"{path} must have {at + count:,} bytes or more{promised} but ends at byte {at + came:,}; fetch it anew")
    return b"".join(parts)


def _part(file: _Readable, path: Path, at: int, size: int) -> bytes:
    try:
        return file.read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is damaged: after byte {at:,} of what is packed in it: {error}; fetch it anew") from error
