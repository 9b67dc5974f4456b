import pytest
import torch

from hora.recipes.lm.carry import by_row, from_rows, initial_states
from hora.recipes.lm.config import ModelConfig
from hora.recipes.lm.model import LanguageModel, State, build_model

LSTM = ModelConfig(hidden_size=3, num_layers=2)
CPU = torch.device("cpu")


def build(config: ModelConfig = LSTM) -> LanguageModel:
    return build_model(config, vocabulary_size=7, window=4, seed=0)


def parts_of(sizes: list[int], first: int = 0) -> list[range]:
    ends = [first + sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def run_window(model: LanguageModel, states: list[State], inputs: torch.Tensor) -> torch.Tensor:
    found = []
    for place, part in enumerate(inputs.split([state[0].size(1) for state in states])):
        logits, states[place] = model(part, states[place])
        found.append(logits)
    return torch.cat(found)


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 1, 2]])
def test_rows_begin_with_a_state_of_zeros_and_go_on_whatever_the_micro_batches(sizes: list[int]) -> None:
    model, inputs = build().double(), torch.randint(7, (5, 12))
    whole, _ = model(inputs, model.initial_state(5))
    states = initial_states(model, parts_of(sizes))
    assert by_row(states, parts_of(sizes), CPU).abs().sum() == 0
    windows = [run_window(model, states, window) for window in inputs.split(4, dim=1)]
    torch.testing.assert_close(torch.cat(windows, dim=1), whole)


def test_state_saved_by_row_can_be_dealt_to_other_ranks() -> None:
    model, inputs = build(), torch.randint(7, (5, 8))
    states = initial_states(model, parts_of([5]))
    run_window(model, states, inputs[:, :4])
    rows = by_row(states, parts_of([5]), CPU).detach()
    assert rows.shape == (5, 2, 2, 3)
    found = []
    for parts in (parts_of([2]), parts_of([1, 2], first=2)):
        share = slice(parts[0].start, parts[-1].stop)
        dealt = from_rows(rows[share], parts, model)
        assert torch.equal(by_row(dealt, parts, CPU), rows[share])
        found.append(run_window(model, dealt, inputs[share, 4:]))
    torch.testing.assert_close(torch.cat(found), run_window(model, states, inputs[:, 4:]))


def test_model_without_memory_carries_nothing() -> None:
    model, parts = build(ModelConfig(kind="transformer", hidden_size=4)), parts_of([1, 2])
    states = initial_states(model, parts)
    assert states == [(), ()]
    rows = by_row(states, parts, CPU)
    assert rows.shape == (3, 0)
    assert from_rows(rows, parts, model) == [(), ()]
