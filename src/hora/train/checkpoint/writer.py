"""Writes checkpoints, at once or in a thread, one at a time.

The thread touches the disk and nothing else: no collective, and no tensor that training may change (see `hora.train.checkpoint.snapshot`).
Imports no torch.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hora.errors import CheckpointError
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.retention import Retention
from hora.train.checkpoint.storage import Storage

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
    """

    manifest: Manifest
    files: "Sequence[ContentFile]"
    damaged: Collection[CheckpointName] = ()
    ready: Callable[[], None] = lambda: None


class Writer:
    """Writes into `storage` and then removes what `retention` does not keep.

    Attributes:
        newest: the last one that was written here; None before.
    """

    def __init__(self, storage: Storage, retention: Retention) -> None:
        self.newest: CheckpointName | None = None
        self._storage = storage
        self._retention = retention
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def path(self, order: Order) -> Path:
        """Where it will stand."""
        return self._storage.path / str(order.manifest.name)

    def write(self, order: Order) -> None:
        """Writes a checkpoint; it is on the disk when this returns.

        Raises:
            CheckpointError: the disk is full or fails; nothing of it is left, and those before it are untouched.
        """
        order.ready()
        try:
            with self._storage.write(order.manifest.name) as draft:
                for file in order.files:
                    draft.add(file.name, file.chunks())
                self._storage.commit(draft, replace(order.manifest, files=draft.files))
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {self.path(order)} could not be written: {error}; it needs {sum(file.size_bytes for file in order.files)} bytes "
                f"and {self._storage.free_bytes()} are free; the checkpoints before it are untouched"
            ) from error
        self.newest = order.manifest.name
        self._retention.prune(self._storage, order.damaged)

    def begin(self, order: Order) -> None:
        """Writes a checkpoint in a thread; `wait` must have been called since the last time.

        The process does not end before the thread has, unless it is killed.
        """
        assert self._thread is None, "one at a time"
        self._thread = threading.Thread(target=self._run, args=(order,), name="hora-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for what was begun, if anything was.

        Raises:
            CheckpointError: it could not be written; told once.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, order: Order) -> None:
        try:
            self.write(order)
        except Exception as error:  # whatever it is, it is told where somebody listens
            step = f"step {order.manifest.step} was to be saved in the background, but"
            what = str(error) if isinstance(error, CheckpointError) else f"checkpoint {self.path(order)} could not be written: {error!r}"
            self._error = CheckpointError(f"{step} {what}")
            self._error.__cause__ = error
