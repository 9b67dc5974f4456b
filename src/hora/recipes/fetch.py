"""Fetches public data sets by name, once for all the processes of a machine that want one.

A data set stands in the cache whole or not at all: its archive is downloaded beside it, what was begun is gone on with, the files in it are
checked against the digests known here, and one rename puts them in place. Standard library only; run before any rank waits for another.
"""

import hashlib
import http.client
import json
import os
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit

from hora import __version__, env, log
from hora.errors import ConfigError

_BLOCK_BYTES: Final = 1 << 18
_ATTEMPTS: Final = 5
_LOCK_TIMEOUT_S: Final = 1800.0
_SOCKET_TIMEOUT_S: Final = 30.0


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
            archive = _Archive(dataset.location(), cache / f".{dataset.name}.part")
            archive.download()
            _unpack(dataset, archive, target)
    except _Unreachable as error:
        raise ConfigError(
            f"{dataset.title} could not be fetched from {dataset.location()}: {error}; {_by_hand(dataset, target)}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the cache directory {cache} must be writable, but: {error.strerror or error}; set XDG_CACHE_HOME to one that is, "
            f"or {_by_hand(dataset, target)}"
        ) from error
    return target


class _Unreachable(Exception):
    """The archive cannot be had from where it should be."""


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
                raise _Unreachable(f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s")
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


# ---- the download


class _Archive:
    """An archive on its way from `url` to `path`; what has come is kept, with the mark by which the host tells whether it still fits."""

    def __init__(self, url: str, path: Path) -> None:
        self.url = url
        self.path = path
        self._mark_path = path.with_name(path.name + ".json")

    def download(self) -> None:
        """Brings the archive, in as many pieces as the connection breaks it into.

        Raises:
            _Unreachable: the host cannot be reached, refuses, or breaks off again and again; what has come stays for the next try.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._bring_rest()
            except urllib.error.HTTPError as error:
                error.close()
                if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                    raise _Unreachable(f"the host answered {error.code} {error.reason}") from error
                self.discard()
            except urllib.error.URLError as error:
                raise _Unreachable(str(error.reason)) from error
            except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
                log.get_logger().info("the connection broke (%s); going on, attempt %d of %d", error, attempt, _ATTEMPTS)
        raise _Unreachable(f"the connection broke {_ATTEMPTS} times; {self._have()} bytes are kept, run the command again to go on")

    def discard(self) -> None:
        """Removes what has come."""
        self.path.unlink(missing_ok=True)
        self._mark_path.unlink(missing_ok=True)

    def _have(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _bring_rest(self) -> None:
        have, mark = self._have(), self._mark()
        # Some hosts refuse the name that urllib gives itself.
        request = urllib.request.Request(self.url, headers={"User-Agent": f"hora/{__version__}"})
        if have and mark:
            request.add_header("Range", f"bytes={have}-")
            request.add_header("If-Range", mark)
        with urllib.request.urlopen(request, timeout=_SOCKET_TIMEOUT_S) as response:
            goes_on = response.status == http.client.PARTIAL_CONTENT
            self._remember(response.headers.get("ETag") or response.headers.get("Last-Modified"))
            log.get_logger().info("fetching %s%s", self.url, f" from byte {have} on" if goes_on else "")
            with self.path.open("ab" if goes_on else "wb") as file:
                _copy(response, file)

    def _mark(self) -> str | None:
        try:
            fields = json.loads(self._mark_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return fields["mark"] if fields.get("url") == self.url else None

    def _remember(self, mark: str | None) -> None:
        # A weak ETag may not be used to go on with a part (RFC 9110, 13.1.5).
        strong = None if mark is None or mark.startswith("W/") else mark
        self._mark_path.write_text(json.dumps({"url": self.url, "mark": strong}), encoding="utf-8")


def _copy(response: http.client.HTTPResponse, file: IO[bytes]) -> None:
    expected = response.length
    came = 0
    while block := response.read(_BLOCK_BYTES):
        file.write(block)
        came += len(block)
    if expected is not None and came < expected:
        raise http.client.IncompleteRead(b"", expected - came)


# ---- the files in it


def _unpack(dataset: Dataset, archive: _Archive, target: Path) -> None:
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
        raise _Unreachable(f"the archive is not the one expected and was removed: {error}") from error
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
