"""Writes checkpoints, at once or in a thread, one at a time, and decides what becomes of one that the disk refuses.

That is a warning, and the next save tries again; or an error. Rank 0, which alone writes, decides, and the other ranks are told.

The thread touches the disk and nothing else: no collective, and no tensor that training may change (see `hora.train.checkpoint.snapshot`).
Imports no torch.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hora import log
from hora.errors import CheckpointError, CheckpointUnwritten, ConfigError
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.retention import Retention, survey
from hora.train.checkpoint.storage import Storage
from hora.train.files import is_of_the_disk

if TYPE_CHECKING:
    from hora.train.checkpoint.content import ContentFile


@dataclass(frozen=True)
class Order:
    """A checkpoint to be written.

    Attributes:
        manifest: how it came about, without its files.
        files: the files beside the manifest.
        damaged: checkpoints that need not be kept when this one stands.
        ready: returns once the bytes of the files are there.
        final: whether no other save will follow, so that a failure of this one is an error in any case.
    """

    manifest: Manifest
    files: "Sequence[ContentFile]"
    damaged: Collection[CheckpointName] = ()
    ready: Callable[[], None] = lambda: None
    final: bool = False


class Writer:
    """Writes into `storage` and then removes what `retention` does not keep.

    Args:
        end_after_failed_saves: how many saves in a row that the disk refuses are an error; fewer are warnings.

    Attributes:
        newest: the last one that was written here; None before.

    Raises:
        ConfigError: `end_after_failed_saves` is not at least 1.
    """

    def __init__(self, storage: Storage, retention: Retention, end_after_failed_saves: int = 1) -> None:
        if end_after_failed_saves < 1:
            raise ConfigError(f"end_after_failed_saves must be at least 1, but is {end_after_failed_saves} instead")
        self.newest: CheckpointName | None = None
        self._storage = storage
        self._retention = retention
        self._end_after = end_after_failed_saves
        self._failed = 0
        self._borne: CheckpointUnwritten | None = None
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def path(self, order: Order) -> Path:
        """Where it will stand."""
        return self._storage.path / str(order.manifest.name)

    def write(self, order: Order) -> bool:
        """Writes a checkpoint; it is on the disk when this returns, unless it is False: the disk refused it, and this was borne.

        Raises:
            CheckpointUnwritten: the disk refused it, and this was not borne; nothing of it is left, and those before it are untouched.
            CheckpointError: somebody else has taken its name, or taken it away.
        """
        order.ready()
        try:
            with self._storage.write(order.manifest.name) as draft:
                for file in order.files:
                    draft.add(file.name, file.chunks())
                self._storage.commit(draft, replace(order.manifest, files=draft.files))
        except OSError as error:
            told = self._describe(order, error)
            if not is_of_the_disk(error):
                raise CheckpointError(told) from error
            self.bear(CheckpointUnwritten(told), final=order.final, cause=error)
            return False
        self.newest = order.manifest.name
        self._failed, self._borne = 0, None
        self._prune(order)
        return True

    def bear(self, error: CheckpointUnwritten, *, final: bool = False, cause: OSError | None = None) -> None:
        """Counts a save that the disk refused: warns of it, or raises it.

        Raises:
            CheckpointUnwritten: it is `final`, or one too many in a row.
        """
        self._failed, self._borne = self._failed + 1, None
        if final or self._failed >= self._end_after:
            raise CheckpointUnwritten(f"{error}; failed saves in a row: {self._failed}") from cause
        log.get_logger().warning(
            "%s; failed saves in a row: %d of %d that are an error; the next save that is due tries again",
            error,
            self._failed,
            self._end_after,
        )
        self._borne = error

    def begin(self, order: Order) -> None:
        """Writes a checkpoint in a thread; `wait` must have been called since the last time.

        The process does not end before the thread has, unless it is killed.
        """
        assert self._thread is None, "one at a time"
        self._thread = threading.Thread(target=self._run, args=(order,), name="hora-checkpoint")
        self._thread.start()

    def settle(self) -> None:
        """Waits for what was begun, if anything was; what went wrong is left for `wait`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def wait(self) -> None:
        """Waits for what was begun, if anything was.

        Raises:
            CheckpointError: it could not be written, and this was not borne; told once.
        """
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits as `wait` does, for the last time.

        Raises:
            CheckpointError: as from `wait`; or the last one could not be written, which was borne because another was to follow.
        """
        self.wait()
        borne, self._borne = self._borne, None
        if borne is not None:
            raise borne

    def _run(self, order: Order) -> None:
        try:
            self.write(order)
        except Exception as error:  # whatever it is, it is told where somebody listens
            step = f"step {order.manifest.step} was to be saved in the background, but"
            what = str(error) if isinstance(error, CheckpointError) else f"checkpoint {self.path(order)} could not be written: {error!r}"
            kind = CheckpointUnwritten if isinstance(error, CheckpointUnwritten) else CheckpointError
            self._error = kind(f"{step} {what}")
            self._error.__cause__ = error

    def _prune(self, order: Order) -> None:
        try:
            self._retention.prune(self._storage, order.damaged)
        except OSError as error:
            log.get_logger().warning("old checkpoints in %s could not be removed: %s", self._storage.path, error)

    def before(self, name: CheckpointName | None = None, damaged: Collection[CheckpointName] = ()) -> str:
        """Says what another start of the run would go on from, now that `name` could not be written."""
        try:
            whole = [each for each in survey(self._storage, damaged)[0] if each != name]
        except OSError:
            whole = [self.newest] if self.newest else []
        return (
            f"the checkpoints before it are untouched, the newest good one is {max(whole)}" if whole else "there is no good one before it"
        )

    def _describe(self, order: Order, error: OSError) -> str:
        try:
            free = f"{self._storage.free_bytes()} are free"
        except OSError as unknown:
            free = f"how many are free cannot be found out ({unknown.strerror})"
        size_bytes = sum(file.size_bytes for file in order.files)
        before = self.before(order.manifest.name, order.damaged)
        return f"checkpoint {self.path(order)} could not be written: {error}; it needs {size_bytes} bytes and {free}; {before}"
