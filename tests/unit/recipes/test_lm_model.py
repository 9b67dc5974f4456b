import math

import pytest
import torch
from torch import Tensor

from hora.recipes.lm.config import NAMED, ModelConfig
from hora.recipes.lm.model import NO_TARGET, LanguageModel, build_model, nll_sum

LSTM = ModelConfig(hidden_size=6, num_layers=2)
TRANSFORMER = ModelConfig(kind="transformer", hidden_size=8, num_layers=2, num_heads=2, init_scale=0.02)
VOCABULARY, WINDOW = 11, 5


def build(config: ModelConfig, seed: int = 1) -> LanguageModel:
    return build_model(config, vocabulary_size=VOCABULARY, window=WINDOW, seed=seed)


def words(rows: int, time: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, time), generator=torch.Generator().manual_seed(rows * 100 + time))


@pytest.mark.parametrize("config", [LSTM, TRANSFORMER])
def test_same_seed_gives_the_same_model_whatever_ran_before(config: ModelConfig) -> None:
    first = build(config).state_dict()
    torch.rand(7)
    second, other = build(config).state_dict(), build(config, seed=2).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_lstm_begins_uniform_within_its_scale_with_one_bias_per_gate() -> None:
    model = build(ModelConfig(hidden_size=40, init_scale=0.04))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("bias_hh" not in name)
        assert parameter.abs().max() <= (0.04 if parameter.requires_grad else 0)
        assert not parameter.requires_grad or parameter.abs().max() > 0.03


def zaremba_step(x: Tensor, h: Tensor, c: Tensor, weight_x: Tensor, weight_h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Equations of section 3 of the paper: input, forget and output gate, and the values to write."""
    i, f, g, o = (x @ weight_x.T + h @ weight_h.T + bias).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def test_lstm_computes_the_equations_of_the_paper() -> None:
    model = build(LSTM).double()
    inputs = words(3, 4)
    logits, (h, c) = model(inputs, model.initial_state(3))
    weights = dict(model.named_parameters())
    values = weights["embedding.weight"][inputs]
    for layer in range(2):
        w_x, w_h, bias = (weights[f"layers.{layer}.{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih"))
        hidden, cell, outputs = torch.zeros(3, 6).double(), torch.zeros(3, 6).double(), []
        for time in range(4):
            hidden, cell = zaremba_step(values[:, time], hidden, cell, w_x, w_h, bias)
            outputs.append(hidden)
        values = torch.stack(outputs, dim=1)
        torch.testing.assert_close((h[layer], c[layer]), (hidden, cell))
    torch.testing.assert_close(logits, values @ weights["output.weight"].T + weights["output.bias"])


def test_two_windows_with_the_state_carried_equal_one_long_window() -> None:
    model = build(LSTM).double()
    inputs = words(2, 10)
    whole, end = model(inputs, model.initial_state(2))
    first, state = model(inputs[:, :5], model.initial_state(2))
    second, last = model(inputs[:, 5:], state)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
    torch.testing.assert_close(last, end)


@pytest.mark.parametrize("config", [LSTM, TRANSFORMER])
def test_prediction_depends_on_no_later_word_and_no_other_row(config: ModelConfig) -> None:
    model = build(config).double()
    inputs = words(2, 5)
    changed = inputs.clone()
    changed[0, 3] = (changed[0, 3] + 1) % VOCABULARY
    before, after = (model(batch, model.initial_state(2))[0] for batch in (inputs, changed))
    torch.testing.assert_close(after[:, :3], before[:, :3])
    torch.testing.assert_close(after[1], before[1])
    assert not torch.allclose(after[0, 3:], before[0, 3:])


@pytest.mark.parametrize("config", [LSTM, TRANSFORMER])
def test_every_trained_parameter_gets_a_gradient(config: ModelConfig) -> None:
    model = build(config)
    logits, _ = model(words(2, 5), model.initial_state(2))
    nll_sum(logits, words(2, 5)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


def test_dropout_falls_on_the_embedding_and_on_each_layers_output() -> None:
    model = build(ModelConfig(hidden_size=6, num_layers=3, keep_prob=0.5))
    masked: list[Tensor] = []
    model.dropout.register_forward_hook(lambda module, inputs, output: masked.append(output))
    logits, _ = model(words(2, 5), model.initial_state(2))
    assert len(masked) == 1 + 3
    assert all((values == 0).any() for values in masked)
    torch.testing.assert_close(logits, model.output(masked[-1].transpose(0, 1)))


def test_same_seed_before_a_step_gives_the_same_dropout() -> None:
    model = build(ModelConfig(hidden_size=6, keep_prob=0.5))
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(model(words(2, 5), model.initial_state(2))[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_transformer_shares_its_matrix_between_input_and_output() -> None:
    names = [name for name, parameter in build(TRANSFORMER).named_parameters() if VOCABULARY in parameter.shape]
    assert names == ["embedding.weight"]


def test_places_without_target_cost_nothing() -> None:
    logits = torch.zeros(1, 3, VOCABULARY)
    assert nll_sum(logits, torch.tensor([[1, NO_TARGET, 2]])).item() == pytest.approx(2 * math.log(VOCABULARY))


def test_medium_has_as_many_parameters_as_published() -> None:
    model = build_model(NAMED["medium"].model, vocabulary_size=10_000, window=35, seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == 2 * (8 * 650 * 650 + 4 * 650) + 2 * 10_000 * 650 + 10_000
    assert round(trained / 1e6) == 20
