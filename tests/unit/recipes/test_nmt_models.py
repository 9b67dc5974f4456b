import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hora.errors import ConfigError
from hora.recipes.nmt.config import ModelConfig
from hora.recipes.nmt.models import TranslationModel, build_model
from hora.recipes.nmt.models.attention import attend_plainly
from hora.recipes.nmt.models.transformer import MAX_LEARNED_PLACES, Transformer
from hora.recipes.nmt.symbols import BOS, PAD

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"n_layers": 2, "n_head": 4, "d_word_vec": 16, "d_model": 16, "d_inner_hid": 24}
CONFIGS = {
    "transformer": ModelConfig(**SIZES),
    "normalised after": ModelConfig(
        **SIZES, layer_norm_first=False, positional_embedding="learned", ffn_activation="gelu", generator_bias=True,
        tie_source_target_embedding=True, dim_per_head=6,
    ),
    "no places": ModelConfig(**SIZES, positional_embedding="none", tie_input_output_embedding=False),
    "dl4mt": ModelConfig(**{**SIZES, "d_word_vec": 12}, model="DL4MT"),
    "dl4mt without bridge": ModelConfig(**SIZES, model="DL4MT", bridge_type="zero"),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> TranslationModel:
    return build_model(CONFIGS[request.param], 30, 30, seed=3).double().eval()


@pytest.fixture
def source() -> Tensor:
    """Rows of 7, 4 and no symbols."""
    source = torch.randint(4, 30, (3, 7), generator=torch.Generator().manual_seed(1))
    source[1, 4:] = PAD
    source[2] = PAD
    return source


@pytest.fixture
def target_in() -> Tensor:
    target_in = torch.randint(4, 30, (3, 6), generator=torch.Generator().manual_seed(2))
    target_in[:, 0] = BOS
    target_in[2, 1:] = PAD
    return target_in


@torch.no_grad()
def test_padding_changes_no_logits_and_a_row_of_it_gives_finite_ones(model: TranslationModel, source: Tensor, target_in: Tensor):
    logits = model(source, target_in)
    torch.testing.assert_close(model(source[1:2, :4], target_in[1:2]), logits[1:2])
    assert logits.shape == (3, 6, 30)
    assert logits.isfinite().all()


@torch.no_grad()
def test_no_logit_looks_at_a_later_symbol(model: TranslationModel, source: Tensor, target_in: Tensor):
    changed = target_in.clone()
    changed[:, 4:] = 9
    torch.testing.assert_close(model(source, changed)[:, :4], model(source, target_in)[:, :4])
    assert not torch.equal(model(source, changed)[:, 4], model(source, target_in)[:, 4])


@torch.no_grad()
def test_steps_give_the_logits_of_the_whole(model: TranslationModel, source: Tensor, target_in: Tensor):
    expected = model(source, target_in)
    state = model.begin(model.encode(source), 1, 8)
    for place, symbols in enumerate(target_in.split(1, dim=1)):
        torch.testing.assert_close(model.project(model.step(symbols, torch.tensor(place), state)), expected[:, place : place + 1])


@torch.no_grad()
def test_hypotheses_that_are_reordered_keep_their_past(model: TranslationModel, source: Tensor):
    begun = torch.tensor([[BOS, 5, 6, 7], [BOS, 8, 9, 7]]).expand(3, 2, 4)  # sentences, hypotheses, places
    state = model.begin(model.encode(source), 2, 4)
    for place in range(3):
        model.step(begun[:, :, place], torch.tensor(place), state)
    model.reorder(state, torch.tensor([[1, 0], [0, 0], [1, 1]]))
    found = model.project(model.step(begun[:, :, 3], torch.tensor(3), state))
    for sentence, parents in enumerate([[1, 0], [0, 0], [1, 1]]):
        expected = model(source[[sentence, sentence]], begun[sentence][parents])[:, 3]
        torch.testing.assert_close(found[sentence], expected)


def test_a_seed_is_a_model_whatever_was_drawn_before(model: TranslationModel):
    config = model._arguments[0]
    torch.rand(5)
    again, other = (build_model(config, 30, 30, seed=seed).double().state_dict() for seed in (3, 4))
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_a_copy_to_decode_is_a_model_of_its_own(model: TranslationModel, source: Tensor, target_in: Tensor):
    model.train()
    copy = model.copy_to_decode(torch.device("cpu"), torch.float64)
    expected = copy(source, target_in)
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(copy(source, target_in), expected)
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert model.copy_to_decode(torch.device("cpu"), torch.bfloat16)(source, target_in).dtype == torch.bfloat16


def test_embeddings_are_tied_as_configured():
    def matrices(**ties: bool) -> int:
        model = build_model(ModelConfig(**SIZES, **ties), 30, 30, seed=0)
        return sum(parameter.shape == (30, 16) for parameter in model.parameters())

    assert matrices(tie_input_output_embedding=False) == 3
    assert matrices() == 2
    assert matrices(tie_source_target_embedding=True) == 1


def test_one_embedding_for_vocabularies_of_two_sizes_is_refused():
    with pytest.raises(ConfigError, match="30 symbols and the target 31"):
        build_model(ModelConfig(**SIZES, tie_source_target_embedding=True), 30, 31, seed=0)


def test_a_sequence_longer_than_learned_places_is_refused():
    model = build_model(CONFIGS["normalised after"], 30, 30, seed=0)
    with pytest.raises(ConfigError, match="up to 1024 symbols, but a sequence has 1025"):
        model.encode(torch.ones(1, MAX_LEARNED_PLACES + 1, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["transformer", "dl4mt"])
def test_models_train_under_autocast(kind: str, source: Tensor, target_in: Tensor):
    model = build_model(CONFIGS[kind], 30, 30, seed=3)
    with torch.autocast("cpu", torch.bfloat16):
        model(source, target_in).float().logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("is_causal", [False, True])
def test_short_sequences_are_attended_to_as_by_the_fused_kernels(is_causal):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, 2, 5, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    mask = None if is_causal else torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1]], dtype=torch.bool)[:, None, None, :]
    found = attend_plainly(query, key, value, mask, 0.0, is_causal=is_causal)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal))


def test_attention_and_perceptron_may_have_a_dropout_of_their_own():
    def shares(config: ModelConfig) -> tuple[set[float], float]:
        model = build_model(config, 30, 30, seed=3)
        assert isinstance(model, Transformer)
        layer = model.decoder[0]
        assert model.source.dropout.p == layer.own_frame.dropout.p == 0.3
        return {layer.own.dropout, layer.source.dropout}, layer.perceptron.dropout.p

    assert shares(ModelConfig(**SIZES, dropout=0.3)) == ({0.3}, 0.3)
    assert shares(ModelConfig(**SIZES, dropout=0.3, attention_dropout=0.1, activation_dropout=0.0)) == ({0.1}, 0.0)
    with pytest.raises(ConfigError, match="attention_dropout is a Transformer's, but the model is DL4MT"):
        ModelConfig(**SIZES, model="DL4MT", attention_dropout=0.1)
