"""Commits that outlive the processes: the newest one as a file, from which those that are started anew go on.

Under `hora run --max-restarts` the file lies in a directory that the launcher makes on its machine and removes when the job ends: it need not
reach the disk, for it is to outlive processes and not the machine. It lies in HORA_HVD_COMMIT_DIR where the user names one, and is on the disk then.
The lowest rank that has such a directory writes; all ranks go on from the newest file that any of them finds.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hora import env, log, pulse
from hora.comm.codec import decode
from hora.errors import CheckpointError, ConfigError
from hora.hvd import pickled
from hora.hvd.basics import rank
from hora.hvd.functions import allgather_object, broadcast_object
from hora.pulse import Section
from hora.train.checkpoint.content import Entry
from hora.train.checkpoint.tensors import TensorFile, read_tensors
from hora.writing import TEMPORARY, replace_with

_NAME = re.compile(r"commit-(\d+)\.g(\d+)\.safetensors")
_TREE = "tree"


@dataclass(frozen=True)
class Commits:
    """The commits of the `number`-th elastic call of a script.

    Args:
        directory: where they lie.
        number: from 0.
        durable: whether they are to be on the disk when they are written.
    """

    directory: Path
    number: int
    durable: bool

    @classmethod
    def find(cls, number: int, environ: Mapping[str, str] = os.environ) -> "Commits | None":
        """Where this rank keeps commits, if anywhere.

        Raises:
            ConfigError: the directory that the user names cannot be made.
        """
        if named := environ.get(env.HVD_COMMIT_DIR):
            try:
                Path(named).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{env.HVD_COMMIT_DIR}={named} must be a directory, but: {error.strerror}") from error
            return cls(Path(named), number, durable=True)
        kept = environ.get(env.KEPT_DIR)
        return cls(Path(kept), number, durable=False) if kept else None

    def newest(self) -> int:
        """The generation of the newest commit; -1: there is none. A later start of the job has a higher one."""
        return max(self._generations(), default=-1)

    def read(self, generation: int) -> Any:
        """What was committed.

        Raises:
            CheckpointError: it cannot be read.
        """
        path = self._path(generation)
        try:
            with safe_open(path, framework="pt") as file:
                skeleton = json.loads((file.metadata() or {})[_TREE])
            tree = decode(skeleton, read_tensors(path))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"the commit {path} cannot be read: {error}; begin anew with an empty directory") from error
        return pickled.unwrap(tree) if pickled.is_wrapped(tree) else tree

    def write(self, tree: Any, generation: int) -> None:
        """Puts a commit in the place of the one before: there is an old or a new one at every moment, whole.

        Raises:
            ConfigError: something in it cannot be kept.
            OSError: the disk is full or fails.
        """
        path = self._path(generation)
        file = _as_file(path.name, tree)
        replace_with(path, file.chunks(), durable=self.durable)
        for old in self._generations():
            if old < generation:
                self._path(old).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes what a killed writer left half written."""
        for left in self.directory.glob(f"{TEMPORARY}commit-*"):
            left.unlink(missing_ok=True)

    def _path(self, generation: int) -> Path:
        return self.directory / f"commit-{self.number}.g{generation}.safetensors"

    def _generations(self) -> list[int]:
        found = (_NAME.fullmatch(name) for name in os.listdir(self.directory))
        return [int(one[2]) for one in found if one is not None and int(one[1]) == self.number]


class Kept:
    """Has commits written, by one rank for all.

    Args:
        commits: where; None on ranks that leave it to another.
        generation: of the files.
    """

    def __init__(self, commits: Commits | None, generation: int) -> None:
        self._commits = commits
        self._generation = generation
        if commits is not None and commits.durable:
            self.prospect = f"the next start of the job goes on from {commits.directory}"
        else:
            self.prospect = (
                f"their launcher goes on from the commit if it starts them anew; {env.HVD_COMMIT_DIR} would keep it for the next job"
            )

    def keep(self, tree: Callable[[], Any]) -> None:
        """Writes what `tree` gives; where the disk is full that is a warning: the job would go on from the commit before."""
        if self._commits is None:
            return
        try:
            with pulse.mine().section(Section.CHECKPOINT):
                self._commits.write(tree(), self._generation)
        except OSError as error:
            log.get_logger().warning(
                "a commit is not kept in %s: %s; a start anew would go on from the one before", self._commits.directory, error
            )

    def end(self) -> None:
        """Has the launcher know, where it removes the commit with the job, that only ranks of its own can go on from it."""
        if self._commits is not None and not self._commits.durable:
            env.fleeting_mark(self._commits.directory, env.JobEnv.read().generation).touch()


def find_commits(number: int) -> tuple[Kept | None, Any]:
    """Where the commits of the `number`-th elastic call are kept (None: nowhere), and what processes before these committed, if anything.

    Collective: all ranks call it.

    Raises:
        CheckpointError: on all ranks: it cannot be read.
    """
    mine = Commits.find(number)
    told = allgather_object(-2 if mine is None else mine.newest(), name="elastic.commits")
    newest, here = max(told), rank()
    if newest == -2:
        return None, None
    is_writer = mine is not None and here == next(each for each, generation in enumerate(told) if generation != -2)
    if mine is not None and is_writer:
        mine.sweep()
    found = None
    if newest >= 0:
        found = _share(mine, newest, told.index(newest))
    generation = max(env.JobEnv.read().generation, newest + 1)
    return Kept(mine if is_writer else None, generation), found


def _share(mine: Commits | None, generation: int, holder: int) -> Any:
    """Gives every rank the commit that `holder` has."""
    said: dict[str, Any] = {}
    if mine is not None and rank() == holder:
        try:
            said = {"tree": mine.read(generation)}
        except (CheckpointError, ConfigError) as error:
            said = {"error": str(error)}
    said = broadcast_object(said, holder, name="elastic.commit")
    if "error" in said:
        raise CheckpointError(said["error"])
    return said["tree"]


def _as_file(name: str, tree: Any) -> TensorFile:
    """One file that holds the tree around the tensors as a word of its header."""
    try:
        entry = Entry.of(name, tree)
    except ConfigError:
        if not pickled.is_allowed():
            raise
        entry = Entry.of(name, pickled.wrap(tree))
    return TensorFile(name, entry.tensors, {_TREE: json.dumps(entry.skeleton, allow_nan=False)})
