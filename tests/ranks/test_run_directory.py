"""The run directory as several ranks see it."""

import os
from pathlib import Path
from unittest import mock

import pytest

import hora
from hora.errors import CheckpointError, ConfigError, HoraError
from hora.testing import run_ranks
from hora.train.metrics import MetricsRow, read_metrics
from hora.train.rank_zero import on_rank_zero
from hora.train.run_directory import RunDirectory


@run_ranks(1, 3)
def test_only_rank_zero_writes(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", config="seed: 1\n") as run, run.open_metrics() as metrics:
        for step in range(1, 3):
            metrics.write(MetricsRow(step=step, epoch=0, split="train", loss=float(hora.rank()), perplexity=2.0))
        assert run.draw_curve()
    hora.barrier()
    assert sorted(os.listdir(run.path)) == ["checkpoints", "config.yaml", "curve.png", "logs", "metrics.jsonl"]
    assert run.config.read_text() == "seed: 1\n"
    hora.barrier()  # all have looked
    if hora.rank() == 0:
        run.tensorboard.touch()
    with pytest.raises(ConfigError, match="must be writable, but is not: .*File exists.*tensorboard"):
        run.open_metrics(after_step=2, tensorboard=True)
    assert [(row["step"], row["loss"]) for row in read_metrics(run.metrics)] == [(1, 0.0), (2, 0.0)]


@run_ranks(1, 2)
def test_a_job_that_is_started_anew_goes_on_with_its_own_directory_and_no_other(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, HORA_JOB_ID="first"), RunDirectory(tmp_path, config="seed: 1\n"):
        pass
    hora.barrier()
    with mock.patch.dict(os.environ, HORA_JOB_ID="second"), pytest.raises(ConfigError, match="holds a run already"):
        RunDirectory(tmp_path, config="seed: 2\n", restarted=True).__enter__()
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    with mock.patch.dict(os.environ, HORA_JOB_ID="first"), RunDirectory(tmp_path, config="seed: 1\n", restarted=True):
        pass
    hora.barrier()
    with pytest.raises(ConfigError, match="holds a run already"):
        RunDirectory(tmp_path, restarted=True).__enter__()  # without a launcher nobody knows whose it is


@run_ranks(1, 2)
def test_a_run_is_not_overwritten_but_can_be_resumed(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, config="seed: 1\n") as run, run.open_metrics() as metrics:
        for step in range(1, 6):
            metrics.write(MetricsRow(step=step, epoch=0, split="train"))
    hora.barrier()
    ended_early = "holds a run already, which ended before its first checkpoint; remove it, or choose another directory"
    with pytest.raises(ConfigError, match=ended_early), RunDirectory(tmp_path):
        pass
    hora.barrier()
    with RunDirectory(tmp_path, config="seed: 1\n", anew=True) as run, run.open_metrics() as metrics:
        hora.barrier()
        assert not list(read_metrics(run.metrics))
        hora.barrier()
        for step in range(1, 6):
            metrics.write(MetricsRow(step=step, epoch=0, split="train"))
    hora.barrier()
    (run.checkpoints / "step-00000003.g0").mkdir(exist_ok=True)
    hora.barrier()
    for anew in (False, True):
        with (
            pytest.raises(ConfigError, match="holds a run already; add --resume to go on with it, or choose another directory"),
            RunDirectory(tmp_path, anew=anew),
        ):
            pass
    assert run.config.read_text() == "seed: 1\n"
    with RunDirectory(tmp_path, config="seed: 2\n", resume=True) as run, run.open_metrics(after_step=3) as metrics:
        metrics.write(MetricsRow(step=4, epoch=1, split="train"))
    hora.barrier()
    assert run.config.read_text() == "seed: 2\n"
    assert [(row["step"], row["epoch"]) for row in read_metrics(run.metrics)] == [(1, 0), (2, 0), (3, 0), (4, 1)]
    assert not (tmp_path / "lock").exists()


@run_ranks(1, 2)
def test_resuming_where_there_is_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume from"), RunDirectory(tmp_path / "absent", resume=True):
        pass
    assert not (tmp_path / "absent").exists()


@run_ranks(2)
def test_a_second_job_is_refused_on_every_rank_and_told_of_the_first(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, config="seed: 1\n"):
        hora.barrier()
        with (
            pytest.raises(ConfigError, match=r"only one job may work in .*, but process \d+ on .* does already"),
            RunDirectory(tmp_path, resume=True),
        ):
            pass
        assert (tmp_path / "lock").exists()
        hora.barrier()


@run_ranks(2)
def test_a_directory_of_logs_alone_is_no_run(tmp_path: Path) -> None:
    if hora.rank() == 0:
        (tmp_path / "logs").mkdir()
    hora.barrier()
    with RunDirectory(tmp_path) as run:
        assert run.logs.is_dir()


@run_ranks(2)
def test_a_directory_that_cannot_be_made_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / f"file{hora.rank()}").write_text("")
    with pytest.raises(ConfigError, match="must be writable, but"), RunDirectory(tmp_path / "file0" / "run"):
        pass


@run_ranks(1, 2, 3)
def test_rank_zero_acts_and_all_share_the_outcome() -> None:
    acted: list[int] = []
    assert on_rank_zero(lambda: acted.append(1) or {"x": (1, None)}) == {"x": (1, None)}
    assert acted == ([1] if hora.rank() == 0 else [])


@run_ranks(1, 2, 3)
def test_an_error_on_rank_zero_is_raised_on_every_rank() -> None:
    def refuse() -> None:
        raise CheckpointError("no room")

    def fail() -> None:
        raise ZeroDivisionError("oops")

    with pytest.raises(CheckpointError, match="^no room$"):
        on_rank_zero(refuse)
    with pytest.raises(ZeroDivisionError if hora.rank() == 0 else HoraError, match="oops"):
        on_rank_zero(fail)
    assert on_rank_zero(lambda: 1) == 1
