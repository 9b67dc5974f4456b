"""Digests of source files, by which hosts can tell whether they would run the same."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import hora

_MANY_FILES = 2000
_SHOWN = 12
_SKIPPED = {"__pycache__", "site-packages", "node_modules", "venv", "env", "build", "dist"}


def digest_of_hora() -> str:
    """Of all that Hora consists of."""
    return digest_of(Path(str(hora.__file__)).parent)


def digest_of(directory: Path) -> str:
    """Of the names and texts of the Python files in `directory` and below, apart from what is installed there; with how many they are.

    Of very many files only the first ones count.
    """
    digest, count = hashlib.sha256(), 0
    for path in _sources(directory):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(directory).as_posix()}\0{len(content)}\0".encode(errors="surrogateescape") + content)
        count += 1
        if count == _MANY_FILES:
            break
    return f"{count} files, {digest.hexdigest()[:_SHOWN]}"


def _sources(directory: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        yield from (Path(place, name) for name in sorted(files) if name.endswith(".py") and os.path.isfile(os.path.join(place, name)))
