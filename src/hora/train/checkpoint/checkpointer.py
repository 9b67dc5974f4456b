"""Saving and loading the state of a run, by all ranks together.

Rank 0 alone touches the disk: it writes what it is given and what the other ranks send, reads and verifies, and gives everything to everybody;
what goes wrong on it goes wrong on every rank. An entry of the state named `model` becomes `model.safetensors` (its tensors) and
`model.json` (the tree around them); the state of logical rank 3 becomes `rank-00003.*`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from hora import log, pulse
from hora.comm.objects import all_gather_object
from hora.comm.session import session
from hora.errors import CheckpointError, CheckpointIncomplete, CheckpointUnwritten, ConfigError
from hora.pulse import Section
from hora.train.checkpoint.agreement import bit_sums, entries_if_kept, facts_of, require_same_parts, require_same_replicas
from hora.train.checkpoint.content import Content, Entry, share
from hora.train.checkpoint.manifest import CheckpointName, Manifest, check_count, check_entries, finite, is_rank_entry, rank_entry
from hora.train.checkpoint.origin import compare_modes, describe
from hora.train.checkpoint.parts import Whole, gather_on_rank_zero, parts_in
from hora.train.checkpoint.retention import Best, Retention, survey
from hora.train.checkpoint.snapshot import Snapshot
from hora.train.checkpoint.storage import Storage
from hora.train.checkpoint.writer import Order, Writer
from hora.train.rank_zero import on_rank_zero

Which = Literal["latest", "best"] | Path


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held; all tensors are on the CPU.

    Attributes:
        state: the trees by their entries' names.
        rank_state: what this logical rank had saved of its own; None if nothing, or if the number of logical ranks has changed.
        manifest: how the checkpoint came about: its step, epoch, metric and so on.
        path: where it stands.
    """

    state: dict[str, Any]
    rank_state: Any
    manifest: Manifest
    path: Path


@dataclass(frozen=True)
class _Wanted:
    """What `Checkpointer.save` was asked for, beside the state."""

    step: int
    epoch: int
    metric: float | None
    background: bool
    final: bool


class Checkpointer:
    """Checkpoints of one run in one directory.

    The directories are called `step-00001200.g0`; the number at the end counts the starts of the run, so that a later start is newer whatever
    its step. Call `prepare` before the first step, also of a run that is resumed. What is saved in the background is on the disk when `wait`, the
    next `save` or `load`, or a `with` block of the checkpointer has ended.

    Args:
        directory: where the checkpoints stand, alone.
        keep_last: how many of the newest are kept, at least 1.
        keep_best: how many of the best by metric are kept besides.
        best: whether a small or a large metric is good.
        end_after_failed_saves: how many saves in a row that the disk refuses (it is full, fails, is read-only or out of reach) are an error.
            Fewer are warnings of rank 0, at once; the next save tries again. All else that goes wrong is an error in any case.

    Raises:
        ConfigError: an argument is out of its bounds.
    """

    def __init__(
        self, directory: Path, *, keep_last: int = 2, keep_best: int = 1, best: Best = "min", end_after_failed_saves: int = 1
    ) -> None:
        self._storage = Storage(Path(directory), rank=session().rank)
        self._retention = Retention(keep_last, keep_best, best)
        self._writer = Writer(self._storage, self._retention, end_after_failed_saves)
        self._generation: int | None = None
        self._damaged: set[CheckpointName] = set()

    def prepare(self, size_bytes: int = 0) -> None:
        """Makes sure before the first step that checkpoints can be written here, and removes what killed processes left.

        Collective: all ranks call it.

        Args:
            size_bytes: expected size of a checkpoint; there must be room for two.

        Raises:
            CheckpointError: the directory cannot be written, or lacks room.
        """
        on_rank_zero(lambda: self._prepare(size_bytes))

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        epoch: int,
        metric: float | None = None,
        rank_state: Any = None,
        background: bool = False,
        final: bool = False,
    ) -> Path | None:
        """Writes a checkpoint and then removes those that need not be kept; it is on the disk when this returns, unless `background`.

        Whatever goes wrong, the checkpoints before it stay whole. After an error whether to go on training is the caller's choice.

        Collective: all ranks call it.

        Args:
            state: what all ranks share, by names of letters, digits, `_` and `-`; rank 0's is written. Trees of dicts, lists, tuples, strings,
                numbers, bytes, None and tensors. A tensor of which each rank has a part (`fully_shard`) is given by all ranks, and written whole.
            step: updates done.
            epoch: from 0.
            metric: what the best are chosen by; None or not finite: never the best.
            rank_state: a small tree of this rank's own, such as its generators.
            background: copy the state, and let a thread of rank 0 write it while training goes on; the tensors may change when this returns.
                One at a time: a save waits for the one before.
            final: no other save will follow, as where a run ends or was asked to stop. It is tried however many the disk has refused before, and
                if it is refused that is an error in any case.

        Returns:
            The directory of the checkpoint; None if the disk refused it and this was borne (`end_after_failed_saves`).

        Raises:
            ConfigError: something in a tree, or a name, cannot be kept, or ranks have parts of different tensors; the message names it.
            CheckpointUnwritten: the disk refused it, for the last time that is borne; or it refused the one before in the background, and then
                nothing of this one is written.
            CheckpointError: a later start of the run has taken over, or another job writes here; or something else went wrong with the one before.
            ReplicaMismatch: a tensor is not the same on all ranks that have it; on every rank alike, and nothing is written.
        """
        with pulse.mine().section(Section.CHECKPOINT):
            return self._save(state, rank_state, _Wanted(step, epoch, finite(metric), background, final))

    def _save(self, state: Mapping[str, Any], rank_state: Any, wanted: _Wanted) -> Path | None:
        on_rank_zero(lambda: self._wait_before(wanted))
        entries = entries_if_kept(state)
        parts = parts_in(entries)
        told = all_gather_object({"sums": bit_sums(entries), "parts": facts_of(parts), "rank_state": rank_state})
        require_same_replicas([each["sums"] for each in told], wanted.step)
        require_same_parts([each["parts"] for each in told])
        whole = gather_on_rank_zero(parts)
        rank_states = [each["rank_state"] for each in told]

        def write() -> str | None:
            try:
                order = self._order(state, whole, rank_states, wanted)
            except CheckpointUnwritten as error:
                self._writer.bear(error, final=wanted.final)
                return None
            if wanted.background:
                self._writer.begin(order)
            elif not self._writer.write(order):
                return None
            return str(self._writer.path(order))

        path = on_rank_zero(write)
        return None if path is None else Path(path)

    def _wait_before(self, wanted: _Wanted) -> None:
        try:
            self._writer.wait()
        except CheckpointUnwritten as error:
            if not wanted.final:
                raise
            log.get_logger().warning("%s; step %d is tried all the same, as the last one", error, wanted.step)

    def wait(self) -> None:
        """Waits until what is saved in the background is on the disk.

        Collective: all ranks call it.

        Raises:
            CheckpointError: it could not be written, and this was not borne; on every rank alike, and once. The message names the step.
        """
        on_rank_zero(self._writer.wait)

    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that this start of the run has written; None before the first.

        Collective: all ranks call it. Waits for what is saved in the background; an error of that is left for `wait` or the next save.
        """

        def look() -> int | None:
            self._writer.settle()
            return self._writer.newest.step if self._writer.newest else None

        with pulse.mine().section(Section.CHECKPOINT):
            return on_rank_zero(look)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits as `wait` does, and raises it if the last save could not be written, although that was borne.

        After an error, which other ranks may not have, rank 0 waits alone and a second error is a warning.
        """
        if kind is None:
            on_rank_zero(self._writer.close)
            return
        try:
            self._writer.wait()
        except CheckpointError as error:
            log.get_logger().warning("%s", error)

    def is_empty(self) -> bool:
        """Whether there is no checkpoint yet: a script that may be started anew goes on from the latest one otherwise. Collective."""
        self.wait()
        return on_rank_zero(lambda: not self._storage.names())

    def load(self, which: Which = "latest") -> Restored:
        """Reads a checkpoint on rank 0, each byte against its digest, and gives it to every rank.

        Collective: all ranks call it. Waits for what is saved in the background, as `wait` does.

        Args:
            which: "latest" or "best": one that is damaged is passed over with a warning that names the damaged file. A path: that one only.

        Raises:
            CheckpointError: there is none, or none that is whole.
            CheckpointMismatch: it was written by a newer version of Hora, or by an exact run with other logical ranks, seed or threads.
        """
        with pulse.mine().section(Section.CHECKPOINT):
            return self._load(which)

    def _load(self, which: Which) -> Restored:
        self.wait()
        content = share(lambda: self._find(which))
        compare_modes(content.manifest)
        trees = {name: entry.tree() for name, entry in content.entries.items()}
        rank_trees = {name: trees.pop(name) for name in list(trees) if is_rank_entry(name)}
        same_ranks = content.manifest.logical_ranks == session().world_size
        rank_state = rank_trees.get(rank_entry(session().rank)) if same_ranks else None
        return Restored(trees, rank_state, content.manifest, content.path)

    def _prepare(self, size_bytes: int) -> None:
        storage = self._storage
        try:
            storage.probe()
            self._settle_generation()
            for name in storage.sweep():
                log.get_logger().info("removed %s, which a process left that was killed", storage.path / name)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written in {storage.path}: {error}; choose another directory") from error
        if storage.free_bytes() < 2 * size_bytes:
            raise CheckpointError(
                f"{storage.path} must have room for two checkpoints of {size_bytes} bytes each, but has {storage.free_bytes()} bytes free "
                "instead; make room or choose another directory"
            )

    def _settle_generation(self) -> int:
        """Fixes the number of this start of the run when it is first asked for: later than any that has written here."""
        if self._generation is None:
            generations = [name.generation + 1 for name in self._storage.names()]
            self._generation = max([session().generation, *generations])
        return self._generation

    def _order(self, state: Mapping[str, Any], whole: Whole, rank_states: list[Any], wanted: _Wanted) -> Order:
        check_count("step", wanted.step)
        check_count("epoch", wanted.epoch)
        check_entries(list(state))
        own = {rank_entry(rank): tree for rank, tree in enumerate(rank_states) if tree is not None}
        entries = [Entry.of(name, tree).with_tensors(whole.get(name, {})) for name, tree in {**state, **own}.items()]
        snapshot = Snapshot.take(entries, whole) if wanted.background else Snapshot(entries)
        files = [file for entry in snapshot.entries for file in entry.files()]
        manifest = describe(self._next_name(wanted.step), wanted.epoch, wanted.metric, len(rank_states))
        return Order(manifest, files, frozenset(self._damaged), snapshot.wait, wanted.final)

    def _next_name(self, step: int) -> CheckpointName:
        """The name under which `step` is saved; it is the newest."""
        try:
            generation, there = self._settle_generation(), self._storage.names()
        except OSError as error:
            raise CheckpointUnwritten(
                f"step {step} could not be saved, for {self._storage.path} cannot be read: {error}; {self._writer.before()}"
            ) from error
        # A shared directory may list late what was written last.
        own = [self._writer.newest] if self._writer.newest else []
        newest = max([*there, *own], default=CheckpointName(-1, 0))
        if newest.generation > generation:
            raise CheckpointError(
                f"generation {generation} of this run must be the last, but generation {newest.generation} has saved {newest} in "
                f"{self._storage.path}: the run was started again and this process must end"
            )
        if newest >= CheckpointName(generation, step):
            # The same step is saved again, perhaps with its metric: beside the first one, which is never replaced in place.
            generation = self._generation = generation + 1
        return CheckpointName(generation, step)

    def _find(self, which: Which) -> Content:
        self._settle_generation()
        if isinstance(which, Path):
            return Content.read(which)
        names = self._candidates(which)
        for name in names:
            try:
                return Content.read(self._storage.path / str(name))
            except CheckpointIncomplete as error:
                self._damaged.add(name)
                log.get_logger().warning("%s; falling back to the one before", error)
        raise CheckpointError(f"no whole checkpoint in {self._storage.path}: each of {', '.join(map(str, names))} is damaged")

    def _candidates(self, which: Which) -> list[CheckpointName]:
        """The checkpoints to try, in this order; at least one."""
        names = self._storage.names()[::-1]
        if not names:
            raise CheckpointError(
                f"nothing to resume from in {self._storage.path}: start without --resume, or give the right run directory; a script asks "
                "is_empty() before it calls load()"
            )
        if which == "latest":
            return names
        if which != "best":
            raise ConfigError(f"which must be 'latest', 'best' or a Path, but is {which!r} instead")
        metrics, _ = survey(self._storage)
        ranked = self._retention.ranked(metrics)
        if not ranked:
            raise CheckpointError(f"no checkpoint in {self._storage.path} has a metric; load the latest one instead")
        return ranked
