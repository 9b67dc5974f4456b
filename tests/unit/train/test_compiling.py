"""What `compile="regions"` takes for the blocks of a model, and what it leaves alone; and where "parts" cuts one."""

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hora.errors import ConfigError
from hora.train.step.compiling import compile_regions, compiled, in_parts, regions_of


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


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.11 warns inside its own compiler on Python 3.12
        yield
    torch.compiler.reset()


def num_backwards(loss: torch.Tensor) -> int:
    """How many compiled functions go back through what led to `loss`."""
    seen: set[Any] = set()
    coming: list[Any] = [loss.grad_fn]
    while coming:
        node = coming.pop()
        if node is not None and node not in seen:
            seen.add(node)
            coming += [following for following, _ in node.next_functions]
    return sum("CompiledFunction" in node.name() for node in seen)


def gradients_of(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_a_model_in_parts_has_the_gradients_of_the_whole_one_after_the_other():
    torch.manual_seed(0)
    model, values = Model(), torch.randn(5, 3)
    expected = gradients_of(model, model(values).square().sum())
    whole, parts = torch.compile(model, backend="aot_eager"), in_parts(model, "aot_eager")
    loss = parts(values).square().sum()
    assert (num_backwards(whole(values).sum()), num_backwards(loss)) == (1, 4)
    torch.testing.assert_close(gradients_of(model, loss), expected)
    with torch.no_grad():
        torch.testing.assert_close(parts(values), model(values))


def test_a_model_that_cannot_be_cut_is_compiled_as_a_whole(caplog: pytest.LogCaptureFixture):
    torch.manual_seed(0)
    model, values = Model(), torch.randn(5, 3)
    with mock.patch.dict("sys.modules", {"torch._dynamo.backends.distributed": None}):
        loss = in_parts(model, "aot_eager")(values).square().sum()
    assert num_backwards(loss) == 1
    assert "compiled as a whole and not in parts" in caplog.text
    torch.testing.assert_close(gradients_of(model, loss), gradients_of(model, model(values).square().sum()))
