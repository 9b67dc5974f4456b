"""The lm recipe in exact mode: one run, the same to the last bit on any number of ranks, and on several in turn."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_lm_resume import assert_same_run, config_of, stopped_run
from test_lm_resume import texts as texts

from hora.errors import CheckpointMismatch, ConfigError
from hora.recipes.lm.config import LmConfig
from hora.recipes.lm.recipe import train
from hora.testing.pool import RankPools


def exact_config(texts: Path, kind: str) -> LmConfig:
    plain = config_of(texts, kind)
    return replace(plain, exact=True, data=replace(plain.data, rows=9, micro_batch_size=1))


def run(rank_pools: RankPools, world_size: int, body, *, exact: bool = True, device: str = "cpu", **arguments) -> None:
    how = {"backend": None, "device": device, "exact": exact}
    outcomes = rank_pools.run(body, arguments, world_size=world_size, how=how, timeout_s=100.0)
    assert all(outcome.clean for outcome in outcomes), outcomes


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_run_is_the_same_on_any_number_of_ranks(kind: str, texts: Path, tmp_path: Path, rank_pools: RankPools) -> None:
    for world_size in (1, 2, 3, 4):
        run(rank_pools, world_size, body_whole, texts=texts, path=tmp_path / str(world_size), kind=kind)
        assert_same_run(tmp_path / str(world_size), tmp_path / "1")


def body_whole(texts: Path, path: Path, kind: str) -> None:
    train(exact_config(texts, kind), path)


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_run_that_changes_its_number_of_ranks_is_the_same(kind: str, texts: Path, tmp_path: Path, rank_pools: RankPools) -> None:
    run(rank_pools, 2, body_whole, texts=texts, path=tmp_path / "whole", kind=kind)
    for stage, (world_size, after) in enumerate([(4, 2), (2, 3), (1, 2), (3, 1)]):
        run(rank_pools, world_size, body_part, texts=texts, path=tmp_path / "parts", kind=kind, after=after, resume=stage > 0)
    run(rank_pools, 4, body_rest, texts=texts, path=tmp_path / "parts", kind=kind)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def body_part(texts: Path, path: Path, kind: str, after: int, resume: bool) -> None:
    assert stopped_run(exact_config(texts, kind), path, after=after, resume=resume).preempted


def body_rest(texts: Path, path: Path, kind: str) -> None:
    assert train(exact_config(texts, kind), path, resume=True).test is not None


def test_run_stays_exact_or_not_for_its_life(texts: Path, tmp_path: Path, rank_pools: RankPools) -> None:
    run(rank_pools, 1, body_begins, texts=texts, path=tmp_path / "run")
    run(rank_pools, 1, body_goes_on_otherwise, exact=False, texts=texts, path=tmp_path / "run")


def body_begins(texts: Path, path: Path) -> None:
    config = exact_config(texts, "lstm")
    stopped_run(config, path, after=1)
    for other in (replace(config, logical_ranks=4), replace(config, exact=False)):
        with pytest.raises(ConfigError, match="hora.init and the configuration must agree on exact mode"):
            train(other, path, resume=True)
    with pytest.raises(ConfigError, match="logical_ranks = 10 is more than data.rows = 9"):
        replace(config, logical_ranks=10)


def body_goes_on_otherwise(texts: Path, path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="exact, logical_ranks"):
        train(replace(exact_config(texts, "lstm"), exact=False), path, resume=True)
