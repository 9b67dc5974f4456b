"""Beam search in CUDA graphs finds what it finds eagerly and what the plain search finds; and translations on NCCL, on as many GPUs as there are."""

import pytest
import test_nmt_decoding
import torch
from again import collect
from gpu_ranks import WORLD_SIZES

from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.decoding import search as searching
from hora.recipes.nmt.decoding.plain import search_plainly
from hora.recipes.nmt.decoding.rules import Rules
from hora.recipes.nmt.decoding.search import BeamSearch
from hora.recipes.nmt.decoding.translating import as_rows
from hora.recipes.nmt.models import TranslationModel, build_model
from hora.recipes.nmt.symbols import EOS

pytestmark = pytest.mark.gpu
globals().update(collect(test_nmt_decoding, "nccl", WORLD_SIZES, timeout_s=120.0))

SIZES = {"n_layers": 2, "n_head": 2, "d_word_vec": 16, "d_model": 16, "d_inner_hid": 32}
RULES = Rules(beam_size=5, alpha=0.6, max_steps=40, keep_n=5)


def model(kind: str, dtype: torch.dtype) -> TranslationModel:
    model = build_model(ModelConfig(**SIZES, model=kind, tie_input_output_embedding=False), 40, 700, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.copy_to_decode(torch.device("cuda"), dtype)


def batches() -> list[list[list[int]]]:
    """Of shapes that come back: their graphs are replayed with other sentences."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randint(4, 40, (length,), generator=generator).tolist() for length in lengths]
        for lengths in ([9, 7, 3], [8, 8, 8, 2], [30, 20], [5], [33, 1, 2])
    ]


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_FIRST_CAPACITY", 16)  # so that it grows on the way
    monkeypatch.setattr(searching, "STEPS_BEFORE_CAPTURE", 1)


@pytest.mark.parametrize("kind", ["Transformer", "DL4MT"])
def test_a_captured_search_finds_what_the_plain_one_finds(kind: str):
    decoder = model(kind, torch.float64)
    search = BeamSearch([decoder], RULES)
    for batch in batches():
        for source, found in zip(batch, search.translate(as_rows(batch)), strict=True):
            expected = search_plainly([decoder], [*source, EOS], RULES)
            assert [each.symbols for each in found] == [each.symbols for each in expected]
            assert [each.score for each in found] == pytest.approx([each.score for each in expected])
    assert 2 <= len(search._steps._batches) <= 6
    assert all(batch.graph is not None for batch in search._steps._batches.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["Transformer", "DL4MT"])
def test_a_captured_search_has_the_bits_of_an_eager_one(kind: str, dtype: torch.dtype):
    decoder = model(kind, dtype)
    captured, eager = BeamSearch([decoder], RULES), BeamSearch([decoder], RULES, capture=False)
    eager._steps.shape = captured._steps.shape  # of the same padded shapes
    for batch in batches():
        assert captured.translate(as_rows(batch)) == eager.translate(as_rows(batch))


def test_models_together_are_captured():
    models = [model("Transformer", torch.float64), model("DL4MT", torch.float64)]
    (batch, *_) = batches()
    found = BeamSearch(models, RULES).translate(as_rows(batch))
    expected = [search_plainly(models, [*source, EOS], RULES) for source in batch]
    assert [[each.symbols for each in best] for best in found] == [[each.symbols for each in best] for best in expected]
