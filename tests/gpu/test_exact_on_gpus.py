"""Exact mode on GPUs: the same bits on as many of 1, 2, 3 and 4 as there are."""

import pytest
import test_exact
import test_exact_lm
from test_exact_lm import texts as texts
from test_lm_resume import assert_same_run
from test_parity_on_gpus import WORLD_SIZES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", test_exact.MODELS)
@pytest.mark.parametrize("strategy", ["overlap", "deferred"])
def test_any_number_of_gpus_gives_the_same_bits(rank_pools, kind, strategy):
    found = {n: test_exact.bits(rank_pools, n, device="cuda", kind=kind, strategy=strategy) for n in WORLD_SIZES}
    assert found == dict.fromkeys(WORLD_SIZES, found[1])


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_language_model_is_the_same_on_any_number_of_gpus(rank_pools, kind, texts, tmp_path):
    for world_size in WORLD_SIZES:
        path = tmp_path / str(world_size)
        test_exact_lm.run(rank_pools, world_size, test_exact_lm.body_whole, device="cuda", texts=texts, path=path, kind=kind)
        assert_same_run(path, tmp_path / "1")


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_language_model_that_changes_its_number_of_gpus_is_the_same(rank_pools, kind, texts, tmp_path):
    most = WORLD_SIZES[-1]
    test_exact_lm.run(rank_pools, 1, test_exact_lm.body_whole, device="cuda", texts=texts, path=tmp_path / "whole", kind=kind)
    for stage, (world_size, after) in enumerate([(most, 2), (1, 3), (WORLD_SIZES[-2:][0], 2)]):
        test_exact_lm.run(
            rank_pools, world_size, test_exact_lm.body_part,
            device="cuda", texts=texts, path=tmp_path / "parts", kind=kind, after=after, resume=stage > 0,
        )  # fmt: skip
    test_exact_lm.run(rank_pools, most, test_exact_lm.body_rest, device="cuda", texts=texts, path=tmp_path / "parts", kind=kind)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
