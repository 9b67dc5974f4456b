"""What `compile="regions"` takes for the blocks of a model, and what it leaves alone."""

from unittest import mock

import pytest
import torch
from torch import nn

from hora.errors import ConfigError
from hora.train.step.compiling import compile_regions, compiled, regions_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.inner(values)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layer(), nn.Tanh()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.embedding(values)
        for layer in self.layers:
            values = layer(values)
        return self.tail(values)


def test_blocks_are_the_outermost_members_with_parts():
    model = Model()
    assert list(regions_of(model)) == [*model.layers, model.tail[1][0]]


def test_blocks_are_compiled_in_place_with_the_options_that_are_given():
    model = Model()
    names = list(model.state_dict())
    with mock.patch.object(nn.Module, "compile", autospec=True) as compile_module:
        compile_regions(model, dynamic=True)
    assert compile_module.mock_calls == [mock.call(block, dynamic=True) for block in regions_of(model)]
    assert list(model.state_dict()) == names


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="needs a model with repeated blocks.*use compile=True"):
        compiled(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "regions")
