import pytest
import torch

from hora.recipes.lm.carry import CarriedState
from hora.recipes.lm.config import ModelConfig
from hora.recipes.lm.model import LanguageModel, build_model

LSTM = ModelConfig(hidden_size=3, num_layers=2)


def build(config: ModelConfig = LSTM) -> LanguageModel:
    return build_model(config, vocabulary_size=7, window=4, seed=0)


def run_window(model: LanguageModel, carried: CarriedState, inputs: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    parts = []
    for part in inputs.split(sizes):
        logits, state = model(part, carried.take(len(part)))
        carried.put(state)
        parts.append(logits)
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 1, 2]])
def test_rows_go_on_where_they_stopped_whatever_the_micro_batches(sizes: list[int]) -> None:
    model, inputs = build().double(), torch.randint(7, (5, 12))
    whole, _ = model(inputs, model.initial_state(5))
    carried = CarriedState(model, 5)
    windows = [run_window(model, carried, window, sizes) for window in inputs.split(4, dim=1)]
    torch.testing.assert_close(torch.cat(windows, dim=1), whole)


def test_state_is_detached_from_the_window_before() -> None:
    model = build()
    carried = CarriedState(model, 2)
    run_window(model, carried, torch.randint(7, (2, 4)), [2])
    assert not any(tensor.requires_grad for tensor in carried.take(2))


def test_reset_makes_the_state_zero() -> None:
    model = build()
    carried = CarriedState(model, 2)
    run_window(model, carried, torch.randint(7, (2, 4)), [1, 1])
    assert carried.by_row().abs().sum() > 0
    carried.reset()
    assert carried.by_row().abs().sum() == 0


def test_state_saved_by_row_can_be_dealt_to_other_ranks() -> None:
    model, inputs = build(), torch.randint(7, (5, 8))
    carried = CarriedState(model, 5)
    run_window(model, carried, inputs[:, :4], [5])
    rows = carried.by_row()
    assert rows.shape[0] == 5
    parts = []
    for share in (range(2), range(2, 5)):
        other = CarriedState(model, len(share))
        other.load(rows[share.start : share.stop])
        parts.append(run_window(model, other, inputs[share.start : share.stop, 4:], [len(share)]))
    torch.testing.assert_close(torch.cat(parts), run_window(model, carried, inputs[:, 4:], [5]))


def test_model_without_memory_carries_nothing() -> None:
    carried = CarriedState(build(ModelConfig(kind="transformer", hidden_size=4)), 3)
    assert carried.take(3) == ()
    carried.put(())
    assert carried.by_row().shape == (3, 0)
    carried.load(torch.zeros(3, 0))
    assert carried.take(1) == ()
