from collections.abc import Sequence

import pytest
import torch

from hora.errors import ConfigError
from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.decoding import search as searching
from hora.recipes.nmt.decoding.batches import deal_batches, plan_batches
from hora.recipes.nmt.decoding.beams import largest
from hora.recipes.nmt.decoding.plain import search_plainly
from hora.recipes.nmt.decoding.rules import Hypothesis, Rules
from hora.recipes.nmt.decoding.search import BeamSearch
from hora.recipes.nmt.decoding.translating import as_rows
from hora.recipes.nmt.models import TranslationModel, build_model
from hora.recipes.nmt.symbols import BOS, EOS, PAD

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"n_layers": 1, "n_head": 2, "d_word_vec": 8, "d_model": 8, "d_inner_hid": 16}
SOURCES = [[7], [4, 9, 12, 5, 6, 8, 15], [5, 4, 4], [10, 11, 6, 13, 14]]


def random_model(seed: int, kind: str = "Transformer") -> TranslationModel:
    """One that has strong opinions, so that translations of all lengths are found."""
    model = build_model(ModelConfig(**SIZES, model=kind, tie_input_output_embedding=False), 16, 13, seed=seed).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


MODELS = {
    "transformer": [random_model(21)],
    "dl4mt": [random_model(9, "DL4MT")],
    "three together": [random_model(8), random_model(19, "DL4MT"), random_model(13)],
}
RULES = [
    Rules(beam_size=5, alpha=0.0, max_steps=11, keep_n=5),
    Rules(beam_size=1, alpha=0.0, max_steps=7),
    Rules(beam_size=4, alpha=1.5, max_steps=11, keep_n=2),
    Rules(beam_size=3, alpha=-1.0, max_steps=9, keep_n=3),
    Rules(beam_size=4, alpha=1.0, max_steps=14, keep_n=4, max_ratio=0.5),  # at most 11 to 14 symbols
]


def plainly(models: Sequence[TranslationModel], rules: Rules) -> list[list[Hypothesis]]:
    return [search_plainly(models, [*source, EOS], rules) for source in SOURCES]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_the_search_finds_what_the_plain_one_finds(kind: str, rules: Rules, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(searching, "_FIRST_CAPACITY", 2)  # so that room grows on the way
    monkeypatch.setattr(searching, "_LENGTH_MULTIPLE", 1)
    models = MODELS[kind]
    found = BeamSearch(models, rules).translate(as_rows(SOURCES))
    expected = plainly(models, rules)
    assert [[each.symbols for each in best] for best in found] == [[each.symbols for each in best] for best in expected]
    for best, theirs in zip(found, expected, strict=True):
        assert [each.score for each in best] == pytest.approx([each.score for each in theirs], rel=1e-9)


def test_hypotheses_of_these_tests_are_short_and_long():
    lengths = [len(each.symbols) for models in MODELS.values() for best in plainly(models, RULES[0]) for each in best]
    assert {0, 11} < set(lengths)
    assert len(set(lengths)) > 6


def test_a_sentence_is_translated_alike_in_any_batch():
    search = BeamSearch(MODELS["transformer"], RULES[0])
    together = search.translate(as_rows(SOURCES))
    alone = [search.translate(as_rows([source]))[0] for source in SOURCES]
    assert [[each.symbols for each in best] for best in together] == [[each.symbols for each in best] for best in alone]


def test_the_search_ends_when_nothing_can_win_any_more():
    steps = []

    class Counting(BeamSearch):
        def _advance(self, batch):
            steps.append(1)
            super()._advance(batch)

    found = Counting(MODELS["dl4mt"], Rules(beam_size=3, alpha=0.5, max_steps=40)).translate(as_rows(SOURCES))
    assert 0 < len(steps) < 40
    assert [each[0].symbols for each in found] == [each[0].symbols for each in plainly(MODELS["dl4mt"], Rules(3, 0.5, 40))]


def test_a_translation_is_no_longer_than_its_source_allows():
    search = BeamSearch(MODELS["transformer"], Rules(beam_size=5, max_steps=100, keep_n=5, max_ratio=1.5))
    longest = [max(len(each.symbols) for each in best) for best in search.translate(as_rows(SOURCES))]
    limits = [int(1.5 * (len(source) + 1)) + 10 for source in SOURCES]
    assert all(length <= limit for length, limit in zip(longest, limits, strict=True))
    assert any(length == limit for length, limit in zip(longest, limits, strict=True))


def test_pad_and_bos_are_never_chosen():
    model = random_model(1)
    with torch.no_grad():
        model.get_parameter("generator.weight")[[PAD, BOS]] = 0
        model.get_parameter("generator.weight")[4:] *= 0.01
    (best,) = BeamSearch([model], Rules(5, max_steps=6, keep_n=5)).translate(as_rows([[5, 6]]))
    assert len(best) == 5
    assert not {PAD, BOS, EOS} & {symbol for each in best for symbol in each.symbols}


def test_scores_are_sums_over_the_length_penalty():
    rules = Rules(beam_size=4, alpha=1.5, max_steps=11, keep_n=4)
    model = MODELS["transformer"][0]
    (best,) = BeamSearch([model], rules).translate(as_rows(SOURCES[1:2]))
    for each in best:
        ended = len(each.symbols) < 11
        target = torch.tensor([[BOS, *each.symbols, *[EOS] * ended]])
        logs = model(as_rows(SOURCES[1:2]), target[:, :-1]).log_softmax(-1)
        total = logs.gather(2, target[:, 1:, None]).sum().item()
        assert each.score == pytest.approx(total / ((5 + len(each.symbols) + ended) / 6) ** 1.5)


@pytest.mark.parametrize("size", [5, 30, 319, 320, 700, 8003])
def test_the_largest_of_a_row_are_those_of_topk(size: int):
    values = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size))
    found, expected = largest(values, 10), values.topk(min(10, size))
    assert torch.equal(found[0], expected.values)
    assert torch.equal(found[1], expected.indices)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"beam_size": 0}, "at least 1"),
        ({"max_steps": 0}, "at least 1"),
        ({"beam_size": 2, "keep_n": 3}, "from 1 to beam_size = 2"),
        ({"max_ratio": float("inf")}, "a number of at least 0"),
        ({"alpha": float("nan")}, "a finite number"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(words: dict[str, int], said: str):
    with pytest.raises(ConfigError, match=said):
        Rules(**words)


def test_batches_hold_sentences_of_like_length_and_no_empty_ones():
    assert plan_batches([3, 0, 9, 3, 1, 5], 2) == [[2, 5], [0, 3], [4]]
    assert plan_batches([0, 0], 2) == []
    assert plan_batches([300, 128, 65, 64, 64, 1], 2) == [[0], [1], [2], [3, 4], [5]]  # long ones in smaller batches


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_batches_are_dealt_out_evenly_and_once(world_size: int):
    lengths = [40, 38, 20, 20, 19, 12, 10, 9, 3, 2, 2]
    batches = plan_batches(lengths, 2)
    dealt = deal_batches(batches, lengths, world_size)
    assert sorted(number for mine in dealt for number in mine) == list(range(len(batches)))
    costs = [sum(len(batches[number]) * lengths[batches[number][0]] for number in mine) for mine in dealt]
    assert max(costs) - min(costs) <= 2 * lengths[0]
