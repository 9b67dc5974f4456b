"""A run of the recipe that is stopped, killed or spoilt, and what the next start makes of it."""

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hora
from hora import events
from hora.cli.train_lm import LmRequest, train_as_rank
from hora.comm import session
from hora.errors import CheckpointError, CheckpointMismatch, ConfigError, NonFiniteGradient
from hora.recipes.lm import recipe
from hora.recipes.lm.config import CheckpointConfig, DataConfig, LmConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from hora.recipes.lm.recipe import train
from hora.recipes.lm.report import Report
from hora.recipes.lm.text import EXCERPT
from hora.testing import run_ranks
from hora.testing.pool import RankPools
from hora.train.config import load_config

STEPS = 13  # of an epoch
EPOCHS = 2


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    for split, count in (("train", 5 * (4 * STEPS + 1)), ("valid", 57), ("test", 41)):
        words = (EXCERPT / f"{split}.txt").read_text(encoding="utf-8").split()[: count - 1]
        (directory / f"{split}.txt").write_text(" ".join(words), encoding="utf-8")
    return directory


def config_of(texts: Path, kind: str = "lstm", every_steps: int | None = None) -> LmConfig:
    """Everything that a checkpoint must bring back matters here: dropout, momentum, hidden state, a rate that falls."""
    lstm = kind == "lstm"
    return LmConfig(
        seed=1,
        epochs=EPOCHS,
        model=ModelConfig(hidden_size=8, keep_prob=0.5) if lstm else ModelConfig("transformer", 8, 1, 2, 0.5, 0.02),
        data=DataConfig(path=str(texts), rows=5, window=4, max_vocabulary=50, micro_batch_size=2),
        optimizer=OptimizerConfig(lr=0.1, momentum=0.9) if lstm else OptimizerConfig("adamw", 1e-2, normalize="tokens"),
        schedule=ScheduleConfig(last_full_epoch=0) if lstm else ScheduleConfig("cosine", warmup_steps=3),
        checkpoint=CheckpointConfig(every_steps=every_steps, keep_last=20),
        tensorboard=False,
    )


class At(events.Observer):
    """Acts once, on one rank, when step `step` of this process has been done."""

    def __init__(self, step: int, rank: int, act: Callable[[], None]) -> None:
        self._step, self._rank, self._act = step, rank, act

    def on_step(self, *, step: int, values: dict[str, float]) -> None:
        if step == self._step and hora.rank() == self._rank:
            self._act()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_run(config: LmConfig, path: Path, *, after: int, resume: bool = False) -> Report:
    """A start of the run in which the last rank gets SIGTERM when it has done `after` steps."""
    with events.observe(At(after - 1, hora.world_size() - 1, terminate)):
        return train(config, path, resume=resume)


def everything(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint but what each rank has added up and shared since."""
    newest = max((path / "checkpoints").iterdir(), key=lambda each: (each.name.split(".g")[0], int(each.name.split(".g")[1])))
    files = [name for name in newest.glob("*.safetensors") if not name.name.startswith("rank-")]
    return {f"{file.stem}.{name}": tensor for file in files for name, tensor in load_file(file).items()}


def measured(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row | {"tokens_per_s": None} for row in rows]


def assert_same_run(found: Path, expected: Path) -> None:
    ours, theirs = everything(found), everything(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert measured(found) == measured(expected)


@pytest.mark.parametrize(("kind", "after"), [("lstm", 1), ("lstm", STEPS - 1), ("lstm", STEPS + 2), ("transformer", 5)])
@run_ranks(1, 3)
def test_stopped_run_goes_on_as_if_nothing_had_happened(kind: str, after: int, texts: Path, tmp_path: Path) -> None:
    config = config_of(texts, kind)
    expected = train(config, tmp_path / "whole")
    first = stopped_run(config, tmp_path / "parts", after=after)
    assert first.preempted in ("SIGTERM", "another rank")
    assert first.test is None
    second = train(config, tmp_path / "parts", resume=True)
    assert second.test == expected.test
    assert (first.valid | second.valid, first.train | second.train) == (expected.valid, expected.train)
    hora.barrier()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@run_ranks(2)
def test_run_stopped_again_and_again_goes_on(texts: Path, tmp_path: Path) -> None:
    config = config_of(texts)
    train(config, tmp_path / "whole")
    assert stopped_run(config, tmp_path / "parts", after=3).preempted
    for after in (1, 4, 9):
        assert stopped_run(config, tmp_path / "parts", after=after, resume=True).preempted
    assert not train(config, tmp_path / "parts", resume=True).preempted
    hora.barrier()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@run_ranks(2)
def test_signal_is_answered_in_the_next_step(texts: Path, tmp_path: Path) -> None:
    stopped_run(config_of(texts), tmp_path, after=6)
    hora.barrier()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000007.g0"]


class Spoiler(events.Observer):
    """Makes one weight infinite, on the last rank, when step `step` has been done."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, *, step: int, values: dict[str, float]) -> None:
        if step == self._step and hora.rank() == hora.world_size() - 1:
            model = list(hora.session().synchronizers)[-1]
            with torch.no_grad():
                next(model.parameters()).fill_(math.inf)


@run_ranks(1)
def test_second_signal_after_the_save_spoils_nothing(tmp_path: Path) -> None:
    """As a scheduler's that signals every process, while the launcher passes its own on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "train", lambda *_, **__: Report(preempted="SIGTERM"))
        patch.setattr(session, "init", lambda **_: None)  # the test's own session is in force
        patch.setattr(session, "shutdown", terminate)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # set by a rank for itself
        assert train_as_rank(LmRequest(data="excerpt", run_dir=tmp_path)) == 75


def crash() -> None:
    raise RuntimeError("crash")


@run_ranks(2)
def test_crashed_run_goes_on_from_its_last_checkpoint(texts: Path, tmp_path: Path) -> None:
    config = config_of(texts, every_steps=5)
    train(config, tmp_path / "whole")
    with events.observe(At(8, hora.rank(), crash)), pytest.raises(RuntimeError, match="crash"):
        train(config, tmp_path / "parts")
    assert train(config, tmp_path / "parts", resume=True).test is not None
    hora.barrier()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@run_ranks(3)
def test_run_goes_on_although_its_latest_checkpoint_is_damaged(texts: Path, tmp_path: Path) -> None:
    config = config_of(texts, every_steps=3)
    train(config, tmp_path / "whole")
    stopped_run(config, tmp_path / "parts", after=7)
    hora.barrier()
    if hora.rank() == 0:
        path = max((tmp_path / "parts" / "checkpoints").iterdir()) / "model.safetensors"  # of step 8
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    hora.barrier()
    train(config, tmp_path / "parts", resume=True)
    hora.barrier()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def without_dropout(texts: Path) -> LmConfig:
    """Of such a run only rounding depends on the number of ranks."""
    config = config_of(texts)
    return replace(config, model=replace(config.model, keep_prob=1.0))


def run_on_three(texts: Path, path: Path) -> None:
    report = train(without_dropout(texts), path / "whole")
    stopped_run(without_dropout(texts), path / "parts", after=5)
    if hora.rank() == 0:
        expected = {"train": list(report.train.values()), "valid": list(report.valid.values()), "test": report.test}
        (path / "expected.json").write_text(json.dumps(expected))


@pytest.fixture(scope="module")
def stopped_on_three(rank_pools: RankPools, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("three")
    how = {"backend": None, "device": "cpu"}
    outcomes = rank_pools.run(run_on_three, {"texts": texts, "path": path}, world_size=3, how=how, timeout_s=60)
    assert not any(outcome.bad for outcome in outcomes), outcomes
    return path


@run_ranks(1, 2, 3, 4)
def test_run_of_three_ranks_goes_on_with_any_number(texts: Path, stopped_on_three: Path, tmp_path: Path) -> None:
    expected = json.loads((stopped_on_three / "expected.json").read_text())
    if hora.rank() == 0:
        shutil.copytree(stopped_on_three / "parts", tmp_path / "run")
    hora.barrier()
    report = train(without_dropout(texts), tmp_path / "run", resume=True)
    assert list(report.train.values()) == pytest.approx(expected["train"], rel=1e-5)
    assert list(report.valid.values()) == pytest.approx(expected["valid"], rel=1e-5)
    assert report.test == pytest.approx(expected["test"], rel=1e-5)


@run_ranks(2)
def test_run_can_begin_with_the_weights_of_a_model_inside_ddp(texts: Path, tmp_path: Path) -> None:
    config = config_of(texts)
    before = train(config, tmp_path / "before")
    if hora.rank() == 0:
        (checkpoint,) = (tmp_path / "before" / "checkpoints").glob(f"step-{EPOCHS * STEPS:08d}.*")
        weights = load_file(checkpoint / "model.safetensors")
        save_file({f"module.{name}": tensor for name, tensor in weights.items()}, tmp_path / "w.safetensors")
    hora.barrier()
    standing = replace(config, epochs=1, seed=7, optimizer=replace(config.optimizer, lr=1e-12))
    report = train(standing, tmp_path / "after", init_from=tmp_path / "w.safetensors")
    assert report.valid[0] == pytest.approx(before.valid[EPOCHS - 1], rel=1e-6)


@run_ranks(2)
def test_resuming_nothing_is_an_error(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume"):
        train(config_of(texts), tmp_path / "none", resume=True)
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="nothing to resume"):
        train(config_of(texts), tmp_path / "empty", resume=True)


@run_ranks(2)
def test_directory_of_a_run_is_not_begun_anew(texts: Path, tmp_path: Path) -> None:
    stopped_run(config_of(texts), tmp_path / "run", after=2)
    with pytest.raises(ConfigError, match="holds a run already; add --resume"):
        train(config_of(texts), tmp_path / "run")


@run_ranks(2)
def test_run_refuses_other_texts_and_another_model(texts: Path, tmp_path: Path) -> None:
    config = config_of(texts)
    stopped_run(config, tmp_path / "run", after=2)
    others = tmp_path / "others"
    if hora.rank() == 0:
        others.mkdir()
        for split in ("train", "valid", "test"):
            (others / f"{split}.txt").write_text((texts / f"{split}.txt").read_text())
        (others / "test.txt").write_text("the end . " * 10)
    hora.barrier()
    with pytest.raises(CheckpointMismatch, match=r"data it began with, but these are others now: test;"):
        train(replace(config, data=replace(config.data, path=str(others))), tmp_path / "run", resume=True)
    with pytest.raises(CheckpointMismatch, match=r"the words of the training text must be those of .*vocab\.json"):
        train(replace(config, data=replace(config.data, max_vocabulary=40)), tmp_path / "run", resume=True)
    with pytest.raises(CheckpointMismatch, match=r"settings it began with, but these are others now: seed, model\.keep_prob;"):
        train(replace(config, seed=2, model=replace(config.model, keep_prob=1.0)), tmp_path / "run", resume=True)
    assert load_config(LmConfig, tmp_path / "run" / "config.yaml") == config


@run_ranks(2)
def test_mistake_in_the_data_leaves_no_run_directory(texts: Path, tmp_path: Path) -> None:
    config = config_of(texts)
    for data in (replace(config.data, rows=1000), replace(config.data, rows=1)):  # too long for the text; fewer than ranks
        with pytest.raises(ConfigError):
            train(replace(config, data=data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@run_ranks(2)
def test_rate_and_number_of_epochs_may_change(texts: Path, tmp_path: Path) -> None:
    config = config_of(texts)
    stopped_run(config, tmp_path / "run", after=2)
    report = train(replace(config, epochs=3, optimizer=replace(config.optimizer, lr=0.01)), tmp_path / "run", resume=True)
    assert list(report.valid) == [0, 1, 2]
    report = train(replace(config, epochs=1), tmp_path / "run", resume=True)
    assert report.valid == {}
    assert report.test is not None
    hora.barrier()
    assert [row["epoch"] for row in measured(tmp_path / "run") if row["split"] == "test"] == [2, 2]


@run_ranks(1, 3)
def test_diverging_run_ends_with_the_step_and_leaves_a_good_checkpoint(texts: Path, tmp_path: Path) -> None:
    config = config_of(texts, every_steps=2)
    with (
        events.observe(Spoiler(step=4)),
        pytest.raises(NonFiniteGradient, match=r"update 5 were not, on rank \d first at micro-step 0, whose"),
    ):
        train(config, tmp_path)
    hora.barrier()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002.g0", "step-00000004.g0"]
    assert all(tensor.isfinite().all() for name, tensor in everything(tmp_path).items() if tensor.is_floating_point())
    report = train(config, tmp_path, resume=True)
    assert report.test is not None
    assert math.isfinite(report.test)
