"""Translations, and their BLEU, are the same on any number of ranks."""

import json
from functools import cache
from typing import Any

import torch

from hora.comm.objects import all_gather_object
from hora.comm.session import session
from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.decoding.bleu import BleuOptions, score_bleu
from hora.recipes.nmt.decoding.plain import search_plainly
from hora.recipes.nmt.decoding.rules import Rules
from hora.recipes.nmt.decoding.search import BeamSearch
from hora.recipes.nmt.decoding.translating import translate_all
from hora.recipes.nmt.models import TranslationModel, build_model
from hora.recipes.nmt.symbols import EOS
from hora.testing import run_ranks

SENTENCES = [[5, 9, 7], [], [11, 4], [5, 9, 7], [8], [6, 6, 10, 5, 12], [], [9, 9, 4, 4], [13, 12, 11, 10, 9, 8, 7]]
RULES = Rules(beam_size=3, max_steps=9, keep_n=2)
REFERENCES = [["a b", "", "c d e f", "a b", "g", "h", "", "i", "a c d"], ["b"] * 9]


def model() -> TranslationModel:
    config = ModelConfig(n_layers=1, n_head=2, d_word_vec=8, d_model=8, d_inner_hid=16, tie_input_output_embedding=False)
    model = build_model(config, 16, 13, seed=21).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.to(session().device)


class Letters:
    """A vocabulary whose words are letters."""

    def decode(self, numbers: list[int]) -> str:
        return " ".join(chr(ord("a") + number - 3) for number in numbers)


@cache
def expected() -> list[list[tuple[str, float]]]:
    """By the plain search, one sentence at a time."""
    decoder = model().eval()
    found = [search_plainly([decoder], [*source, EOS], RULES) if source else [] for source in SENTENCES]
    return [[(Letters().decode(each.symbols), each.score) for each in best] or [("", 0.0)] for best in found]


def translated(sentences: list[list[int]], batch_size: int) -> Any:
    search = BeamSearch([model().eval()], RULES)
    found = translate_all(search, sentences, Letters().decode, batch_size=batch_size)
    assert (found is not None) == (session().rank == 0)
    return None if found is None else [[(each.text, each.score) for each in best] for best in found]


@run_ranks(1, 2, 3, 4)
def test_translations_are_those_of_one_process_in_the_order_of_the_text():
    torch.set_num_threads(1)
    for batch_size in (1, 2, 100):
        found = translated(SENTENCES, batch_size)
        for best, theirs in zip(found or (), expected(), strict=found is not None):
            assert [text for text, _ in best] == [text for text, _ in theirs]
            torch.testing.assert_close([score for _, score in best], [score for _, score in theirs])
    assert len({text for best in expected() for text, _ in best}) > 6
    assert translated([], 2) in ([], None)
    assert translated([[], []], 2) in ([[("", 0.0)]] * 2, None)
    once = translated([[5, 9, 7]], 4)  # fewer sentences than ranks
    assert once is None or [text for text, _ in once[0]] == [text for text, _ in expected()[0]]
    _check_bleu()


def _check_bleu() -> None:
    """BLEU is sacrebleu's of these translations, on all ranks, and the model goes on as it was."""
    import sacrebleu

    trained = model().train()
    rules = Rules(beam_size=3, max_steps=9)
    options = BleuOptions.parse("-lc --tokenize none --smooth-method floor")
    vocabulary: Any = Letters()
    found = score_bleu(trained, SENTENCES, REFERENCES, vocabulary, rules, batch_size=2, options=options, precision="float32")
    told = all_gather_object(json.dumps([found.score, found.signature]))
    assert len(set(told)) == 1
    assert trained.training
    if session().rank == 0:
        best = [each[0][0] for each in expected()]
        assert found.translations == best
        metric = sacrebleu.BLEU(lowercase=True, tokenize="none", smooth_method="floor")
        assert found.score == metric.corpus_score(best, REFERENCES).score
        assert "nrefs:2|case:lc|eff:no|tok:none|smooth:floor" in found.signature
