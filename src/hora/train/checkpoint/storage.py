"""The directory in which checkpoints stand: list, read, verify, write, remove.

A checkpoint is written into `.tmp-NAME-OWNER` beside its place, each file and then the directory is forced to the disk, and one rename
makes it appear; removing one begins with a rename to `.trash-...`. So a process that is killed at any moment leaves the old or the new, each
whole, and at worst hidden leftovers that `sweep` finds. Symbolic links are never followed.
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hora import events
from hora.comm.owner import Owner, is_gone
from hora.errors import CheckpointIncomplete
from hora.train.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, CheckpointName, FileFacts, Manifest
from hora.train.files import open_regular, write_file
from hora.writing import TEMPORARY, sync_directory

_TRASH: Final = ".trash-"
_LEFTOVER_AGE_S: Final = 24 * 3600


class Draft:
    """A checkpoint that is being written; nobody sees it yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, FileFacts] = {}

    def add(self, name: str, chunks: Iterable[memoryview | bytes]) -> None:
        """Writes one file, forces it to the disk and notes its size and digest."""
        self.files[name] = FileFacts(*write_file(self.path / name, chunks))


class Storage:
    """Checkpoints in one directory.

    Args:
        path: the directory; made by `write` and `probe`, not by reading.
        rank: whose fault points are passed.
    """

    def __init__(self, path: Path, *, rank: int = 0) -> None:
        self.path = path
        self._rank = rank

    def names(self) -> list[CheckpointName]:
        """Checkpoints that stand here, whole or damaged, the newest last."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            return sorted(name for entry in entries if entry.is_dir(follow_symlinks=False) and (name := CheckpointName.parse(entry.name)))
        return []

    def manifest(self, name: CheckpointName) -> Manifest:
        """Reads one manifest and looks whether the files are there in their sizes, not what is in them.

        Raises:
            CheckpointIncomplete: the manifest is damaged, or a file is missing or has another size.
            CheckpointMismatch: it was written by a newer version.
        """
        manifest = read_manifest(self.path / str(name))
        if manifest.name != name:
            raise CheckpointIncomplete(f"{self.path / str(name)} has the manifest of {manifest.name}")
        return manifest

    @contextmanager
    def write(self, name: CheckpointName) -> Iterator[Draft]:
        """Gives a draft to fill; `commit` it inside the block. Whatever is not committed when the block ends is removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        draft = Draft(self.path / f"{TEMPORARY}{name}-{Owner.current().token}")
        # Only this process makes this name: what stands there was left by a failure that could not be cleaned up.
        shutil.rmtree(draft.path, ignore_errors=True)
        draft.path.mkdir()
        try:
            self._pass("opened")
            yield draft
        finally:
            shutil.rmtree(draft.path, ignore_errors=True)

    def commit(self, draft: Draft, manifest: Manifest) -> Path:
        """Makes a draft appear under its name, which must be free: whole and on the disk when this returns."""
        self._pass("written")
        write_file(draft.path / MANIFEST, [manifest.render()])
        sync_directory(draft.path)
        self._pass("fsynced")
        final = self.path / str(manifest.name)
        try:
            draft.path.rename(final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                error.strerror = (
                    "a checkpoint of that name is there already: another job writes here, or the directory is shared and listed it late"
                )
            raise
        sync_directory(self.path)
        self._pass("committed")
        return final

    def remove(self, name: CheckpointName) -> None:
        """Removes one checkpoint; it is gone as a whole before its first file is."""
        trash = self.path / f"{_TRASH}{name}-{Owner.current().token}"
        (self.path / str(name)).rename(trash)
        shutil.rmtree(trash)

    def sweep(self) -> list[str]:
        """Removes what killed processes left and returns the names; a draft whose writer may be alive stays for a day."""
        swept = []
        with suppress(FileNotFoundError):
            for entry in list(os.scandir(self.path)):
                if entry.name.startswith(_TRASH) or (entry.name.startswith(TEMPORARY) and _is_abandoned(entry)):
                    self._discard(entry.name)
                    swept.append(entry.name)
        return swept

    def probe(self) -> None:
        """Proves that checkpoints can be written here: makes the directory and writes, syncs, renames and removes a small file in it.

        Raises:
            OSError: they cannot.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        probe, renamed = (self.path / f"{TEMPORARY}probe{end}-{Owner.current().token}" for end in ("", "-renamed"))
        try:
            write_file(probe, [b"probe"])
            probe.rename(renamed)
            sync_directory(self.path)
        finally:
            for path in (probe, renamed):
                path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Bytes that this process may still write here."""
        return shutil.disk_usage(next(path for path in (self.path, *self.path.absolute().parents) if path.exists())).free

    def _discard(self, name: str) -> None:
        """Takes a leftover out of its writer's reach by a rename, should that writer live after all, and removes it."""
        trash = self.path / (name if name.startswith(_TRASH) else f"{_TRASH}{name.removeprefix('.')}")
        with suppress(OSError):
            (self.path / name).rename(trash)
            if trash.is_dir() and not trash.is_symlink():
                shutil.rmtree(trash, ignore_errors=True)
            else:
                trash.unlink()

    def _pass(self, point: str) -> None:
        events.fault_point(f"checkpoint.{point}", rank=self._rank)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    gone = is_gone("-".join(entry.name.split("-")[-3:]))
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFTOVER_AGE_S if gone is None else gone


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint at `path` and compares the sizes of its files.

    Raises:
        CheckpointIncomplete: the manifest is damaged, or a file is missing, no regular file or of another size.
        CheckpointMismatch: it was written by a newer version.
    """
    try:
        with open_regular(path / MANIFEST) as file:
            manifest = Manifest.parse(file.read(MAX_MANIFEST_BYTES))
        for name, facts in manifest.files.items():
            with open_regular(path / name) as file:
                _expect(name, "have", f"{facts.size_bytes} bytes", f"{os.fstat(file.fileno()).st_size} bytes")
    except OSError as error:
        raise CheckpointIncomplete(f"{path} is damaged: {Path(error.filename or path).name}: {error.strerror}") from error
    except CheckpointIncomplete as error:
        raise CheckpointIncomplete(f"{path} is damaged: {error}") from error
    return manifest


def verify(path: Path, entries: Collection[str] | None = None) -> Manifest:
    """Reads every byte of the checkpoint at `path`, or of these `entries` of it, and compares the digests.

    Raises:
        CheckpointIncomplete: a file is missing or differs from its digest; the message names it.
        CheckpointMismatch: it was written by a newer version.
    """
    manifest = read_manifest(path)
    files = {name: facts for name, facts in manifest.files.items() if entries is None or Path(name).stem in entries}
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        digests = pool.map(_digest, (path / name for name in files))
        try:
            for (name, facts), digest in zip(files.items(), digests, strict=True):
                _expect(name, "have SHA-256", facts.sha256, digest)
        except (OSError, CheckpointIncomplete) as error:
            raise CheckpointIncomplete(f"{path} is damaged: {error}") from error
    return manifest


def _expect(name: str, verb: str, wanted: str, found: str) -> None:
    if wanted != found:
        raise CheckpointIncomplete(f"{name} must {verb} {wanted}, but has {found} instead")


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
