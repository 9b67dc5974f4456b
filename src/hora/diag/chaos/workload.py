"""The program that trials run: a small network in exact mode, from the newest checkpoint on (`python -m hora.diag.chaos.workload SETTINGS`)."""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import hora
from hora import env, events
from hora.diag.chaos import injuries, mistakes
from hora.diag.chaos.journal import Journal
from hora.diag.chaos.settings import BATCH, LOADER_TIMEOUT_S, Settings
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.lock import DirectoryLock
from hora.train.preemption import EXIT_CODE, Preemption
from hora.train.rank_zero import on_rank_zero

_LOOK_S = 0.01


class _Follower(events.Observer):
    """Writes down which samples a rank was given."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def on_samples(self, *, epoch: int, step: int, micro_step: int, indices: Sequence[int]) -> None:  # noqa: ARG002
        self._journal.note("samples", epoch=epoch, step=step, ids=[int(index) for index in indices])


class _Run:
    """Model, optimizer, data and checkpoints of one start."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self._settings, self._journal = settings, journal
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))
        checks = hora.Checks(non_finite=cast("Any", settings.non_finite), check_every=settings.check_every, repair=settings.repair)
        self.optimizer = hora.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), 1e-2), self.model, checks=checks)
        draw = torch.Generator().manual_seed(2)
        data = torch.utils.data.TensorDataset(
            torch.randn(settings.samples, 8, generator=draw), torch.randint(4, (settings.samples,), generator=draw)
        )
        options = {"num_workers": settings.num_workers, "timeout": LOADER_TIMEOUT_S} if settings.num_workers else {}
        self.loader = hora.DataLoader(data, global_batch_size=BATCH, seed=3, **options)
        self.checkpointer = Checkpointer(Path(settings.directory) / "checkpoints", keep_last=3, keep_best=0)
        self.done = 0

    def resume(self) -> None:
        """Takes up the newest checkpoint, if there is one."""
        self.checkpointer.prepare()
        if not self.checkpointer.is_empty():
            restored = self.checkpointer.load()
            self.model.load_state_dict(restored.state["model"])
            self.optimizer.load_state_dict(restored.state["optimizer"])
            self.loader.load_state_dict(restored.state["data"])
            self.done = restored.manifest.step
        self._journal.note("resumed", done=self.done)

    def go(self, preemption: Preemption) -> bool:
        """Makes the updates that are left; False if it was asked to stop before, and has saved."""
        while self.done < self._settings.steps:
            for step in self.loader:
                began_s = time.monotonic()
                if preemption.requested:
                    self.optimizer.request_stop()
                self._update(step)
                self._journal.note("step", done=self.done)
                injuries.strike(self._settings, self.model, self.done, self._journal)
                if self.optimizer.stop_agreed:
                    self._save()
                    self._journal.note("stopped", done=self.done)
                    return False
                if self.done % self._settings.save_every == 0:
                    self._save()
                if self.done == self._settings.steps:
                    return True
                if self.done in self._settings.held:
                    self._wait_to_go_on()
                injuries.pace(self._settings, self.done, began_s)
        return True

    def _wait_to_go_on(self) -> None:
        self._journal.note("held", done=self.done, day_s=time.time())
        while not (Path(self._settings.directory) / f"go-{self.done}").exists():
            time.sleep(_LOOK_S)

    def _update(self, step: Iterable[tuple[Tensor, Tensor]]) -> None:
        for inputs, targets in self.optimizer.micro_batches(step):
            loss_sum = nn.functional.cross_entropy(self.model(inputs), targets, reduction="sum")
            if (hora.rank(), self.done) == self._settings.poison:
                loss_sum = loss_sum * float("nan")
            self.optimizer.backward(loss_sum, weight=len(targets))
        self.optimizer.step()
        self.done += 1

    def _save(self) -> None:
        if self._settings.repair:
            self.optimizer.compare_replicas()  # what is mended here is not refused below
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "data": self.loader.state_dict()}
        if self._settings.ballast_bytes:
            state["ballast"] = {"bytes": torch.ones(self._settings.ballast_bytes, dtype=torch.uint8)}
        try:
            self.checkpointer.save(state, step=self.done, epoch=0)
        except hora.errors.CheckpointError as error:
            if not self._settings.tolerant:
                raise
            self._journal.note("unsaved", done=self.done, said=str(error))
        else:
            self._journal.note("saved", done=self.done)

    def digest(self) -> str:
        """Of the bits of the model and of the optimizer's state."""
        sha = hashlib.sha256()
        _feed(sha, self.model.state_dict())
        _feed(sha, self.optimizer.state_dict()["state"])
        return sha.hexdigest()


def _feed(sha: Any, tree: Any) -> None:
    for name in sorted(tree, key=str):
        if isinstance(tree[name], dict):
            _feed(sha, tree[name])
        elif isinstance(tree[name], Tensor):
            sha.update(str(name).encode() + tree[name].detach().numpy().tobytes())


def main() -> int:
    """Runs as one rank; returns its exit code."""
    settings = Settings.from_json(sys.argv[1])
    job = env.JobEnv.read()
    journal = Journal(Path(settings.directory), f"{job.job_id}-{job.generation}", int(os.environ["RANK"]))
    if settings.stubborn:
        signal.signal(signal.SIGINT, lambda *_: journal.note("asked"))
    with Preemption() as preemption, events.observe(_Follower(journal)):
        hora.init(exact=None if settings.mistake else True)
        try:
            return mistakes.make(settings.mistake, journal) if settings.mistake else _train(settings, journal, preemption)
        except hora.errors.HoraError as error:
            journal.note("refused", said=f"{type(error).__name__}: {error}")
            raise
        finally:
            hora.shutdown()


def _train(settings: Settings, journal: Journal, preemption: Preemption) -> int:
    lock = DirectoryLock(Path(settings.directory))
    on_rank_zero(lock.acquire)
    try:
        run = _Run(settings, journal)
        run.resume()
        whole = run.go(preemption)
        if whole:
            journal.note("end", done=run.done, digest=run.digest(), skipped=run.optimizer.skipped_steps, day_s=time.time())
        return 0 if whole else EXIT_CODE
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main())
