"""Fetches public data sets by name, once for all the processes of a machine that want one.

A data set stands in the cache whole or not at all: its archive is downloaded beside it, what was begun is gone on with, the files in it are
checked against the digests known here, and one rename puts them in place. Standard library only; run before any rank waits for another.
"""

import hashlib
import os
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit

from hora import env
from hora.errors import ConfigError
from hora.recipes.download import Archive, Unreachable

_BLOCK_BYTES: Final = 1 << 18
_LOCK_TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True)
class Member:
    """A file of a data set: its name in the archive, its size and its SHA-256."""

    source: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """A data set that can be fetched: a zip archive at `url`, of which `members` (by the names they get here) are kept."""

    name: str
    title: str
    url: str
    members: Mapping[str, Member]

    def location(self, environ: Mapping[str, str] = os.environ) -> str:
        """Where the archive is fetched from: at `url`, or under its own name at the place that `HORA_DATA_URL` names."""
        base = environ.get(env.DATA_URL)
        url = f"{base.rstrip('/')}/{self.url.rsplit('/', 1)[1]}" if base else self.url
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"{env.DATA_URL} must begin with http:// or https://, but is {base!r} instead")
        return url


# The digests are those of the files inside, not of the archive, so that any host may pack them anew.
DATASETS: Final = {
    "wikitext-2": Dataset(
        name="wikitext-2",
        title="WikiText-2 (word level, version 1)",
        url="https://wikitext.smerity.com/wikitext-2-v1.zip",
        members={
            "train.txt": Member(
                "wikitext-2/wiki.train.tokens", 10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"
            ),
            "valid.txt": Member(
                "wikitext-2/wiki.valid.tokens", 1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"
            ),
            "test.txt": Member(
                "wikitext-2/wiki.test.tokens", 1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"
            ),
        },
    )
}


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where data sets are kept: `$XDG_CACHE_HOME/hora`, by default `~/.cache/hora`."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hora"


def fetch(dataset: Dataset, cache: Path | None = None) -> Path:
    """The directory with the files of `dataset`, fetched first if it is not there.

    Of several processes that call this at once one fetches and the others wait for it.

    Args:
        dataset: one of `DATASETS`.
        cache: where the directory is, or is made; `cache_directory()` by default.

    Raises:
        ConfigError: there is no network, the host refuses, the files are not those expected, or the cache cannot be written; the message
            says what to do.
    """
    cache = cache or cache_directory()
    target = cache / dataset.name
    if target.is_dir():
        return _checked(dataset, target)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{dataset.name}.lock"):
            if target.is_dir():
                return _checked(dataset, target)
            archive = Archive(dataset.location(), cache / f".{dataset.name}.part")
            archive.download()
            _unpack(dataset, archive, target)
    except Unreachable as error:
        raise ConfigError(
            f"{dataset.title} could not be fetched from {dataset.location()}: {error}; {_by_hand(dataset, target)}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the cache directory {cache} must be writable, but: {error.strerror or error}; set XDG_CACHE_HOME to one that is, "
            f"or {_by_hand(dataset, target)}"
        ) from error
    return target


def _by_hand(dataset: Dataset, target: Path) -> str:
    names = ", ".join(f"{name} ({member.source} of the archive)" for name, member in dataset.members.items())
    return f"put {names} into {target}, or name another host with {env.DATA_URL}, or give a folder of your own with --data"


def _checked(dataset: Dataset, directory: Path) -> Path:
    for name, member in dataset.members.items():
        path = directory / name
        found = _sha256(path) if path.is_file() else "absent"
        if found != member.sha256:
            raise ConfigError(
                f"{path} must be that of {dataset.title} (SHA-256 {member.sha256}), but is {found} instead; remove {directory} to have it "
                f"fetched anew, or give it as a folder with --data {directory}"
            )
    return directory


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- one process at a time


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock that ends with the process, however it ends."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("ab") as file:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise Unreachable(f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        yield


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


# ---- the files in it


def _unpack(dataset: Dataset, archive: Archive, target: Path) -> None:
    """Puts the members of the archive at `target`, all or none; an archive that lacks one or has another text is removed."""
    staging = target.with_name(f".{dataset.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        with zipfile.ZipFile(archive.path) as zipped:
            for name, member in dataset.members.items():
                _extract(zipped, member, staging / name)
        os.replace(staging, target)
    except (_WrongMember, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise Unreachable(f"the archive is not the one expected and was removed: {error}") from error
    finally:
        archive.discard()
        shutil.rmtree(staging, ignore_errors=True)


class _WrongMember(Exception):
    """An archive lacks a file, or has another in its place."""


def _extract(zipped: zipfile.ZipFile, member: Member, path: Path) -> None:
    """Writes one member to `path`: never more than its known size, and never to where the archive would like to have it."""
    try:
        info = zipped.getinfo(member.source)
    except KeyError:
        raise _WrongMember(f"it has no {member.source}") from None
    digest, left = hashlib.sha256(), member.size_bytes + 1
    with zipped.open(info) as source, path.open("wb") as file:
        while left and (block := source.read(min(_BLOCK_BYTES, left))):
            left -= len(block)
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != member.sha256:
        raise _WrongMember(f"{member.source} has SHA-256 {digest.hexdigest()}, but {member.sha256} was expected")
